"""NIfTI files: read and written completely, with errors that say what is wrong."""

from __future__ import annotations

import gzip
import io
import math
import pathlib
import zlib
from typing import Any

import numpy as np

from meshwright.tasks.input.atomic_files import atomic_write

_ENDINGS = (".nii.gz", ".nii")
# By the unit's code in a header: metres and micrometres. All other codes count as mm.
_MILLIMETRES = {1: 1e3, 3: 1e-3}

# The two kinds' headers have 348 and 540 bytes; extensions of some software follow. As
# many bytes may follow the voxels, but no more: zipped, an endless file of zeros is
# small.
_HEADER_BYTES = _TRAILING_BYTES = 2**20
_PIECE = 2**24

MOST_VOXELS = 2**31
"""A volume's limit, with its channels: 8 GiB of float32. Headers may say anything."""


def read_nifti(path: str, *, header_only: bool = False) -> Any:
    """A nibabel image with complete data, an invertible affine, and real voxels.

    With `header_only` its data is not read, and may be broken.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there is no such image in it; the message names the file.
      OSError: the file cannot be read.
    """
    nibabel, _ = libraries()
    stem(path)
    failures = (ValueError, EOFError, zlib.error, gzip.BadGzipFile)
    failures += (ArithmeticError, MemoryError)
    failures += (nibabel.filebasedimages.ImageFileError,)
    failures += (nibabel.spatialimages.HeaderDataError,)
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            content = io.BytesIO(file.read(_HEADER_BYTES))
            image = _kind(content.getvalue()).from_stream(content)
            _check_header(image)
            if not header_only:
                _read_voxels(file, image, content)
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"there is no {path}: correct the list that names it, or put it there"
        ) from e
    except failures as e:
        raise ValueError(
            f"{path} is no NIfTI file that can be used ({e}): write it anew with the "
            "program that made it, convert it to .nii.gz, or leave it out"
        ) from e
    return image


def write_nifti(path: str, image: Any) -> None:
    """Saves a nibabel image, all of it or nothing. Makes folders.

    Raises:
      ValueError: the path does not end in .nii or .nii.gz.
      OSError: the file cannot be written.
    """
    nibabel, _ = libraries()
    stem(path)
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as new:
        nibabel.save(image, new)


def stem(path: str) -> str:
    """The name of a file, without .nii or .nii.gz.

    Raises:
      ValueError: the name ends in neither.
    """
    name = pathlib.Path(path).name
    for ending in _ENDINGS:
        if name.endswith(ending) and name != ending:
            return name.removesuffix(ending)
    raise ValueError(
        f"{path} does not end in {' or '.join(_ENDINGS)}: volumes are NIfTI files, "
        "convert others"
    )


def millimetre_affine(image: Any) -> np.ndarray:
    """A nibabel image's affine in mm, float64 [4, 4], whatever its header's unit."""
    unit = int(image.header["xyzt_units"]) & 7
    return np.diag([*[_MILLIMETRES.get(unit, 1.0)] * 3, 1.0]) @ image.affine


def libraries() -> tuple[Any, Any]:
    """nibabel and scipy.ndimage.

    Raises:
      ImportError: a library is missing.
    """
    try:
        import nibabel  # Only volumes need it.
        import scipy.ndimage
    except ImportError as e:
        raise ImportError(
            f"volumes need nibabel and scipy, and {e.name} is not installed: pip "
            "install 'meshwright[seg]'"
        ) from e
    return nibabel, scipy.ndimage


def _kind(content: bytes) -> type:
    """The class of nibabel that reads a file of this content."""
    nibabel, _ = libraries()
    if content[344:347] == b"n+1":
        return nibabel.Nifti1Image
    if content[4:7] == b"n+2":
        return nibabel.Nifti2Image
    raise ValueError(f"it has {len(content)} bytes, and begins with {content[:8]!r}")


def _check_header(image: Any) -> None:
    shape, dtype = image.shape, image.header.get_data_dtype()
    if min(shape, default=0) < 1:
        raise ValueError(f"its shape {list(shape)} has no voxel")
    if math.prod(shape) > MOST_VOXELS:
        raise ValueError(f"its shape {list(shape)} has more than {MOST_VOXELS} voxels")
    if dtype.kind not in "uif":
        raise ValueError(f"its voxels are {dtype}, no real numbers")
    finite = np.isfinite(image.affine).all()
    if not finite or np.linalg.cond(image.affine[:3, :3]) > 1e6:
        raise ValueError(f"its affine {image.affine.tolist()} is singular")


def _read_voxels(file: Any, image: Any, content: io.BytesIO) -> None:
    """Reads the rest of a file into `content`, which has its first bytes."""
    itemsize = image.header.get_data_dtype().itemsize
    wanted = image.dataobj.offset + math.prod(image.shape) * itemsize
    most = wanted + _TRAILING_BYTES
    size = content.seek(0, io.SEEK_END)
    # To the end, as gzip compares checksums only there; and piece by piece, as all that
    # a header claims would be allocated at once.
    while size <= most and (piece := file.read(min(_PIECE, most + 1 - size))):
        size += content.write(piece)
    if size < wanted:
        raise ValueError(f"it has {size} bytes of {wanted}")
    if size > most:
        raise ValueError(f"it goes on after its {wanted} bytes")

"""Volumes with a label for each voxel: NIfTI files that a list names.

Files differ in voxel size and in the directions of their axes; their affine says both.
A loaded volume has axes that run right, front and up, as near as reorienting brings
them, and voxels of the requested size. A prediction goes back onto the file's grid.

Dims: X Y Z the volume, C channels.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import gin
import numpy as np

from meshwright.framework.modeling.checks import Checked, bounded, check_value
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.input.places import on_disk
from meshwright.tasks.segmentation.nifti import (
    MOST_VOXELS,
    libraries,
    millimetre_affine,
    read_nifti,
    stem,
    write_nifti,
)

# How far apart, in voxels, the corners of an image and its label may be: as far as
# rounding of headers explains.
_CORNER_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """An image and its labels.

    Args:
      name: the image's file name, without .nii or .nii.gz; unique in a list.
      image: path of a NIfTI file.
      label: path of the label's file, or None if there is no label.
    """

    name: str
    image: str
    label: str | None = None


@runtime_checkable
class SegmentationFiles(Protocol):
    """A source of labelled volumes, such as `VolumeFiles` or `SyntheticVolumes`."""

    def read(self, split: Split) -> Sequence[Case]:
        """The volumes of a split, the same in the same order each time."""

    def classes(self) -> tuple[str, ...]:
        """The meaning of each label value: value i is the name at i."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeFiles(Checked):
    """Cases that a dataset.json lists. Construction reads nothing.

    The file is as in the Medical Segmentation Decathlon (Antonelli et al. 2022): an
    object with "labels", such as {"0": "background", "1": "liver"}, and "training",
    objects with "image" and "label", paths relative to the file. If it also has
    "validation", these cases are held out, and all others are trained on.

    Args:
      path: the path of the dataset.json.
      held_out_one_in: without "validation", about one case in so many is held out,
        chosen by a hash of its name: adding cases moves no other case.

    Raises:
      ValueError: nothing is left to train on.
    """

    path: str
    held_out_one_in: int = bounded(5, at_least=2)

    def read(self, split: Split) -> list[Case]:
        """The cases of a split, in the file's order; read once in a process.

        Raises:
          FileNotFoundError: the file, or a file that an entry names, does not exist.
          ValueError: the file is malformed; a name occurs twice; the split is empty.
        """
        listed = _listed(self.path)
        if listed.validation:
            cases = listed.validation if split is Split.HELD_OUT else listed.training
        else:
            cases = [c for c in listed.training if self._split_of(c) is split]
        if not cases:
            raise ValueError(
                f"{self.path} lists no {split.value} case: add some, or change "
                f"held_out_one_in, which holds out one in {self.held_out_one_in}"
            )
        return list(cases)

    def classes(self) -> tuple[str, ...]:
        """The meaning of each label value, by number. Raises as `read`."""
        return _listed(self.path).classes

    def _split_of(self, case: Case) -> Split:
        return Split.by_hash(case.name.encode(), self.held_out_one_in)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Intensities:
    """Scales each channel of a volume to mean 0 and variance 1; if constant, to 0.

    Args:
      clip: lowest and highest intensity that count, such as (-200, 300) Hounsfield
        units, or None for all.

    Raises:
      ValueError: `clip` is no two ascending numbers.
    """

    clip: Sequence[float] | None = None

    def __post_init__(self):
        if self.clip is None:
            return
        clip = tuple(self.clip)
        object.__setattr__(self, "clip", clip)
        if len(clip) != 2 or not -math.inf < clip[0] < clip[1] < math.inf:
            raise ValueError(
                f"Intensities.clip is {clip}: give the lowest intensity that counts, "
                "and then the highest, above it"
            )

    def normalized(self, image: np.ndarray) -> np.ndarray:
        """The normalized image, float32 [X, Y, Z, C] as the given one."""
        if self.clip is not None:
            image = np.clip(image, *self.clip)
        over = {"axis": (0, 1, 2), "dtype": np.float64}
        mean, deviation = image.mean(**over), image.std(**over)
        deviation[deviation == 0] = np.inf
        # In float32: otherwise a large volume would be held twice over.
        out = np.subtract(image, mean, dtype=np.float32)
        return np.divide(out, deviation.astype(np.float32), out=out)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Volume:
    """A case as a model reads it.

    Args:
      image: float32 [X, Y, Z, C].
      label: int32 [X, Y, Z], or None.
      affine: float64 [4, 4], from a voxel's indices to millimetres right, front and up.
    """

    image: np.ndarray
    label: np.ndarray | None
    affine: np.ndarray


def grid(case: Case, *, spacing: Sequence[float] | None) -> tuple[int, ...]:
    """X, Y, Z and C of the volume that `load` would return, from headers alone.

    Raises:
      FileNotFoundError, ImportError, ValueError: as `load`, as far as headers tell.
    """
    file = _image(case, header_only=True)
    if case.label is not None:
        _check_grid(case, file, read_nifti(case.label, header_only=True))
    affine = millimetre_affine(file)
    axes = np.argsort(libraries()[0].io_orientation(affine)[:, 0])
    size = np.array(file.shape[:3])[axes]
    if spacing is not None:
        voxel = np.linalg.norm(affine[:3, :3], axis=0)[axes]
        size = _new_size(case, size, _three(spacing) / voxel)
    return (*map(int, size), *(file.shape[3:] or (1,)))


def load(
    case: Case,
    classes: Sequence[str],
    *,
    spacing: Sequence[float] | None,
    intensities: Intensities,
) -> Volume:
    """Reads a case. Images are resampled linearly, labels by the nearest voxel.

    Args:
      case: what to read.
      classes: names of label values.
      spacing: size of a voxel along X, Y and Z in mm, or None for the file's. A
        resampled volume keeps its middle, and its borders to half a voxel.
      intensities: how the image's values are scaled.

    Raises:
      FileNotFoundError: a file does not exist.
      ImportError: nibabel or SciPy is missing.
      ValueError: a file is broken or no NIfTI file; an image has other than 3 or 4
        dims, or voxels that are not finite; a label is not on the image's grid, or has
        values that are no class. The message names the file.
    """
    file = _image(case)
    image = file.get_fdata(dtype=np.float32, caching="unchanged")
    image = image.reshape(*file.shape[:3], -1)
    strange = image.size - np.count_nonzero(np.isfinite(image))
    if strange:
        raise ValueError(
            f"{case.image} has {strange} voxels, of {image.size}, that are no finite "
            "float32 numbers: replace them, by 0 say, or leave the case out"
        )
    label = None if case.label is None else _label(case, file, classes)
    image, label, affine = _canonical(image, label, millimetre_affine(file))
    if spacing is not None:
        image, label, affine = _resampled(case, image, label, affine, _three(spacing))
    return Volume(image=intensities.normalized(image), label=label, affine=affine)


def save(path: str, values: np.ndarray, *, like: Case, volume: Volume) -> None:
    """Writes predicted labels on the grid of an image, all of the file or nothing.

    Each voxel of the file gets the label of the nearest voxel of `volume`.

    Args:
      path: the file to write, ending in .nii or .nii.gz.
      values: whole numbers [X, Y, Z], on the grid of `volume`.
      like: the case whose image has the wanted grid, orientation and header.
      volume: the volume loaded for it.

    Raises:
      ValueError: the path has another ending; the shape is not `volume`'s; a value is
        no whole number or below 0; the image cannot be read.
      OSError: the file cannot be written.
    """
    _, ndimage = libraries()
    values, shape = np.asarray(values), volume.image.shape[:3]
    if values.shape != shape:
        raise ValueError(
            f"labels of shape {list(values.shape)} are to be saved as {path}, and the "
            f"volume loaded for {like.name} has {list(shape)}: give a label for each "
            "voxel"
        )
    if values.dtype.kind not in "bui" or values.min() < 0:
        raise ValueError(
            f"labels to be saved as {path} are of type {values.dtype} from "
            f"{values.min()} on: give the classes' numbers, from 0 on"
        )
    dtype = np.min_scalar_type(int(values.max()))
    original = read_nifti(like.image)
    back = np.linalg.inv(volume.affine) @ millimetre_affine(original)
    labels = ndimage.affine_transform(
        values.astype(dtype),
        back[:3, :3],
        back[:3, 3],
        output_shape=original.shape[:3],
        order=0,
        mode="nearest",  # A border is up to half a voxel beyond a middle.
    )
    header = original.header.copy()
    header.set_data_dtype(dtype)
    header["cal_min"] = header["cal_max"] = 0  # The image's display range.
    write_nifti(path, type(original)(labels, original.affine, header))


def _image(case: Case, *, header_only: bool = False) -> Any:
    file = read_nifti(case.image, header_only=header_only)
    if len(file.shape) not in (3, 4):
        raise ValueError(
            f"{case.image} has {len(file.shape)} dims, {list(file.shape)}: write "
            "volumes of 3 dims, or 4 of which the last is channels"
        )
    return file


def _label(case: Case, image: Any, classes: Sequence[str]) -> np.ndarray:
    """Labels int32 on the grid of the image, below the number of classes."""
    file = read_nifti(case.label)
    _check_grid(case, image, file)
    label = np.asanyarray(file.dataobj)
    with np.errstate(invalid="ignore"):
        integers = label.astype(np.int32)
    wrong = (integers != label) | (integers < 0) | (integers >= len(classes))
    if wrong.any():
        values, counts = np.unique(label[wrong], return_counts=True)
        listed = ", ".join(
            f"{value} in {count} voxels"
            for value, count in list(zip(values, counts, strict=True))[:5]
        )
        known = ", ".join(f"{i} {name}" for i, name in enumerate(classes))
        raise ValueError(
            f"{case.label} has label values that are no class: {listed}, {len(values)} "
            f"such values in all; classes are {known}: correct the file, or name the "
            'value in "labels" of dataset.json'
        )
    return integers


def _check_grid(case: Case, image: Any, label: Any) -> None:
    """Checks that two nibabel images have equal shapes, and equal corners."""
    shape = image.shape[:3]
    if label.shape != shape:
        raise ValueError(
            f"{case.label} has shape {list(label.shape)}, and {case.image}, which it "
            f"labels, {list(shape)}: make the label on the image's grid"
        )
    corners = np.indices((2, 2, 2)).reshape(3, 8) * np.array(shape)[:, None]
    corners = np.concatenate([corners, np.ones([1, 8])])
    to_voxels = np.linalg.inv(millimetre_affine(image))
    farthest = np.abs(to_voxels @ millimetre_affine(label) @ corners - corners).max()
    if farthest > _CORNER_TOLERANCE:
        raise ValueError(
            f"{case.label} and {case.image}, which it labels, have affines that place "
            f"a corner {farthest:.3g} voxels apart, {label.affine.tolist()} and "
            f"{image.affine.tolist()}: make the label on the image's grid"
        )


def _canonical(image, label, affine):
    """Permutes and flips the axes of an image and a label, which may be None."""
    nibabel, _ = libraries()
    orientation = nibabel.io_orientation(affine)
    back = nibabel.orientations.inv_ornt_aff(orientation, image.shape[:3])
    image, label = (
        None
        if array is None
        else np.ascontiguousarray(nibabel.apply_orientation(array, orientation))
        for array in (image, label)
    )
    return image, label, affine @ back


def _resampled(case: Case, image, label, affine, spacing: np.ndarray):
    """Changes the size of voxels, but not the directions of axes."""
    _, ndimage = libraries()
    old = np.array(image.shape[:3])
    scale = spacing / np.linalg.norm(affine[:3, :3], axis=0)
    new = _new_size(case, old, scale)
    offset = ((old - 1) - (new - 1) * scale) / 2
    to = {"output_shape": tuple(new), "mode": "nearest"}
    channels = [
        ndimage.affine_transform(channel, scale, offset, order=1, **to)
        for channel in np.moveaxis(image, -1, 0)
    ]
    if label is not None:
        label = ndimage.affine_transform(label, scale, offset, order=0, **to)
    step = np.diag([*scale, 1.0])
    step[:3, 3] = offset
    return np.stack(channels, axis=-1), label, affine @ step


def _new_size(case: Case, size: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The number of voxels, each `scale` times as long, that reach as far."""
    new = np.maximum(1, np.rint(size / scale))
    if not np.prod(new) <= MOST_VOXELS:
        raise ValueError(
            f"{case.image} is resampled to {new.tolist()} voxels, more than "
            f"{MOST_VOXELS}: widen the spacing, or correct the file's affine"
        )
    return new.astype(int)


def _three(spacing: Sequence[float]) -> np.ndarray:
    if len(spacing) != 3:
        raise ValueError(f"spacing is {spacing}: give 3 sizes of a voxel, in mm")
    for size in spacing:
        check_value("spacing", size, above=0)
    return np.array(spacing, np.float64)


@dataclasses.dataclass(frozen=True)
class _Listed:
    classes: tuple[str, ...]
    training: tuple[Case, ...]
    validation: tuple[Case, ...]


@functools.cache
def _listed(path: str) -> _Listed:
    file = pathlib.Path(on_disk(path, "VolumeFiles.path"))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"there is no data set {path}: set VolumeFiles.path to its dataset.json"
        ) from e
    except IsADirectoryError as e:
        raise ValueError(
            f"{path} is a folder: set VolumeFiles.path to the dataset.json in it"
        ) from e
    # ValueError means no UTF-8, no JSON, or a number of thousands of digits.
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not JSON in UTF-8: {e}") from e
    if not isinstance(content, dict):
        raise ValueError(f'{path} is no object: write one with "labels" and "training"')
    entries = {key: _entries(path, content, key) for key in ("training", "validation")}
    splits = {
        key: tuple(_case(place, file.parent, entry) for place, entry in of)
        for key, of in entries.items()
    }
    _check_names(path, [case for cases in splits.values() for case in cases])
    return _Listed(classes=_classes(path, content), **splits)


def _classes(path: str, content: dict) -> tuple[str, ...]:
    labels = content.get("labels")
    try:
        named = {int(value): name for value, name in labels.items()}
        is_valid = all(isinstance(name, str) for name in named.values())
    except (AttributeError, ValueError):
        is_valid = False
    if not is_valid or len(named) < 2 or sorted(named) != list(range(len(named))):
        raise ValueError(
            f'{path} has "labels" {labels!r}: name each value from 0 on, leaving none '
            'out, two at least, as in {"0": "background", "1": "liver"}'
        )
    return tuple(named[value] for value in range(len(named)))


def _entries(path: str, content: dict, key: str) -> list[tuple[str, Any]]:
    """The entries, each with its place for messages."""
    entries = content.get(key, [])
    if not isinstance(entries, list) or (key == "training" and not entries):
        raise ValueError(
            f'{path} has "{key}" {entries!r}: list objects with "image" and "label"'
        )
    return [(f'{path} "{key}"[{i}]', entry) for i, entry in enumerate(entries)]


def _case(place: str, folder: pathlib.Path, entry: Any) -> Case:
    paths = {}
    for key in ("image", "label"):
        named = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(named, str):
            raise ValueError(
                f'{place} is {entry!r}, without a path as "{key}": write an object '
                'with "image" and "label"'
            )
        paths[key] = folder / named
        if not os.path.isfile(paths[key]):
            raise FileNotFoundError(
                f"{place} names {named!r}, and there is no {paths[key]}"
            )
    return Case(stem(str(paths["image"])), str(paths["image"]), str(paths["label"]))


def _check_names(path: str, cases: list[Case]) -> None:
    seen = {}
    for case in cases:
        first = seen.setdefault(case.name, case)
        if first is not case:
            raise ValueError(
                f"{path} names two images {case.name!r}, {first.image} and "
                f"{case.image}: list each once, under a unique name"
            )

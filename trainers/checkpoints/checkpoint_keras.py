"""Reads files of Keras: `.keras`, `.weights.h5`, and `.weights.json` with its parts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.checkpoint_manifest import ArraySpec

_ENDINGS = (".keras", ".h5", ".hdf5", ".weights.json")
_WEIGHTS = "model.weights.h5"  # Of a `.keras` file, which is a zip archive.
_OPTIMIZER = "optimizer/"
_UNPACKED, _TIMES = 2**28, 100  # What is larger, and so much so, is no file of Keras.


@dataclasses.dataclass(frozen=True)
class FileArray:
    """An array of a file, of which nothing is read until it is asked for.

    Args:
      name: such as `layers/dense/vars/0`.
      form: its shape and dtype.
      file: the file's name, for messages.
      dataset: HDF5's.
    """

    name: str
    form: ArraySpec
    file: str
    dataset: Any

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part of it, read from the file.

        Raises:
          CheckpointError: the file is damaged there.
        """
        try:
            value = np.asarray(self.dataset[index])
        except (OSError, RuntimeError, ValueError) as error:
            raise _unreadable(self.file, error) from error
        if self.form.dtype == "bfloat16":
            return value.view(jnp.bfloat16)  # HDF5 has bytes without a type.
        return value.astype(self.form.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class KerasFile:
    """What a file of Keras has.

    Args:
      arrays: by name; slots of an optimizer are left out.
      is_old: whether it is in the format of Keras 2's `.h5` files, in which names are
        those of layers and variables.
    """

    arrays: dict[str, FileArray]
    is_old: bool


def is_keras_file(path: str) -> bool:
    """Whether a path is, by its name, that of a file of Keras."""
    return path.lower().endswith(_ENDINGS)


@contextlib.contextmanager
def opened_keras_file(path: str) -> Iterator[KerasFile]:
    """A context in which the arrays of a file can be read.

    Raises:
      CheckpointError: there is no such file, or it is none of Keras's, or damaged.
    """
    with contextlib.ExitStack() as stack:
        try:
            files = list(_opened(epath.Path(path), stack))
            found = [array for file in files for array in _arrays(path, file)]
        # HDF5 says most things by OSError, some by RuntimeError, ValueError, KeyError.
        except (
            *(OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError),
            *(zipfile.BadZipFile, NotImplementedError),
        ) as error:
            raise _unreadable(path, error) from error
        arrays = {a.name: a for a in found if not a.name.startswith(_OPTIMIZER)}
        is_old = any("layer_names" in f.attrs or "model_weights" in f for f in files)
        yield KerasFile(arrays, is_old)


def _opened(path: epath.Path, stack: contextlib.ExitStack) -> Iterator[Any]:
    """The HDF5 files at a path, opened."""
    import h5py  # Takes a moment, for files of Keras only.

    if not path.exists():
        raise CheckpointError(f"there is no file {path}: see InitializeFrom.checkpoint")
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder: name a file in it, such as {path / _WEIGHTS}"
        )
    if path.name.lower().endswith(".json"):
        parts = json.loads(path.read_text())["weight_map"].values()
        lists = [[part] if isinstance(part, str) else part for part in parts]
        for name in sorted({name for names in lists for name in names}):
            if epath.Path(name).name != name:
                raise ValueError(f"it names {name!r}, which is in another folder")
            yield from _opened(path.parent / name, stack)
        return
    local = str(path)
    if path.name.lower().endswith(".keras"):
        local = _unpacked(path, stack)
    elif "://" in local:
        with path.open("rb") as file:
            local = _copied(file, stack)
    yield stack.enter_context(h5py.File(local, "r"))


def _unpacked(path: epath.Path, stack: contextlib.ExitStack) -> str:
    """A copy of the weights in a `.keras` file; the archive's digest is checked."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        if _WEIGHTS not in archive.namelist():
            raise CheckpointError(
                f"{path} has no {_WEIGHTS}, but {', '.join(archive.namelist()[:5])}: "
                "load it by Keras, and save it by model.save_weights"
            )
        member = archive.getinfo(_WEIGHTS)
        if member.file_size > max(_UNPACKED, _TIMES * member.compress_size):
            raise ValueError(f"{_WEIGHTS} would unpack to {member.file_size:,} bytes")
        with archive.open(member) as weights:
            return _copied(weights, stack)


def _copied(file: Any, stack: contextlib.ExitStack) -> str:
    """The name of a copy that lasts as long as the context."""
    copy = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / _WEIGHTS
    with copy.open("wb") as out:
        shutil.copyfileobj(file, out, 2**20)
    return str(copy)


def _arrays(path: str, file: Any) -> list[FileArray]:
    """The arrays of numbers in an HDF5 file; links to other files are not followed."""
    found = []

    def visit(name: str, item: Any) -> None:
        # A group has no dtype, and an array of HDF5's kind "null" no shape.
        dtype = getattr(item, "dtype", None)
        if dtype is None or item.shape is None:
            return
        if item.external or item.is_virtual:
            raise ValueError(f"{name} is in another file")
        is_bfloat16 = item.attrs.get("dtype") == "bfloat16" and dtype.itemsize == 2
        if is_bfloat16 or dtype.kind in "biufc":
            form = ArraySpec(item.shape, "bfloat16" if is_bfloat16 else dtype.name)
            found.append(FileArray(name, form, path, item))

    file.visititems(visit)
    return found


def _unreadable(path: str, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    text = " ".join(str(error).split())
    return CheckpointError(
        f"the file {path} of Keras cannot be read ({text[:300]}): use another file"
    )

"""Reads and writes safetensors: one file, or several with an index."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.checkpoint_manifest import ArraySpec

WHOLE, INDEX, CONFIG = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
)
_ENDING, _INDEX_ENDING = ".safetensors", ".safetensors.index.json"
_MAX_JSON = 2**26  # An index of a million tensors has less.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file, of which nothing is read until it is asked for.

    Args:
      name: such as `model.norm.weight`.
      form: its shape and dtype.
      file: the file's path, for messages.
      cut: safetensors' own slice of it.
    """

    name: str
    form: ArraySpec
    file: str
    cut: Any

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part of it, read from the file: `...`, or a slice for each dim.

        Raises:
          CheckpointError: the file cannot be read there.
        """
        try:
            return np.asarray(self.cut[index])
        except Exception as error:  # SafetensorError, OSError, TypeError of a dtype.
            raise _unreadable(self.file, error) from error


@dataclasses.dataclass(frozen=True)
class SafetensorsFiles:
    """What a file, or several with an index, have.

    Args:
      tensors: by name.
      config: what the config.json beside them says; None if there is none.
      config_file: its path.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any] | None
    config_file: str


def is_safetensors(path: str) -> bool:
    """Whether a path is that of such a file, its index, or a folder with one.

    A folder is one, too, if it has a config.json and files of other names, and may be
    on a bucket, to be told what it lacks.
    """
    if path.endswith((_ENDING, _INDEX_ENDING)):
        return True
    try:
        names = tf.io.gfile.listdir(path)
    except tf.errors.OpError:  # No folder, or nowhere that TensorFlow can look.
        return False
    others = CONFIG in names and any(name.endswith(_ENDING) for name in names)
    return WHOLE in names or INDEX in names or others


@contextlib.contextmanager
def opened_safetensors(path: str) -> Iterator[SafetensorsFiles]:
    """A context in which the tensors at a path can be read.

    Args:
      path: as `is_safetensors` takes it.

    Raises:
      CheckpointError: there is no such file, or it is damaged; a folder has several
        without an index; the index names a file that is not there, or tensors that are
        not in it; safetensors is not installed.
    """
    if "://" in path:
        raise CheckpointError(
            f"{path} is not on a disk: copy it to one, for parts of it to be read"
        )
    file = pathlib.Path(path)
    if file.is_dir():
        file = _main_file(file)
    with contextlib.ExitStack() as stack:
        if file.name.endswith(_INDEX_ENDING):
            tensors = _by_index(file, stack)
        else:
            tensors = _opened(file, stack)
        config = file.parent / CONFIG
        content = _json(config) if config.is_file() else None
        yield SafetensorsFiles(tensors, content, str(config))


def write_safetensors(
    folder: pathlib.Path,
    arrays: Mapping[str, Callable[[], np.ndarray]],
    sizes: Mapping[str, int],
    *,
    file_bytes: int,
) -> None:
    """Writes tensors in their order: one file, or several with an index.

    Args:
      folder: where to, which is there.
      arrays: makes each tensor, by its name; a file's are made when it is written.
      sizes: bytes of each.
      file_bytes: the most of a file, unless one tensor has more.

    Raises:
      CheckpointError: safetensors is not installed.
    """
    _library()
    from safetensors import numpy as numpy_files

    parts: list[list[str]] = [[]]
    left = file_bytes
    for name in arrays:
        if parts[-1] and sizes[name] > left:
            parts.append([])
            left = file_bytes
        parts[-1].append(name)
        left -= sizes[name]
    names = [WHOLE]
    if len(parts) > 1:
        names = [
            f"model-{i + 1:05}-of-{len(parts):05}{_ENDING}" for i in range(len(parts))
        ]
    for file, part in zip(names, parts, strict=True):
        # Readers of PyTorch refuse files that do not say so.
        about = {"format": "pt"}
        numpy_files.save_file({n: arrays[n]() for n in part}, folder / file, about)
        (folder / file).chmod(0o644)  # The library lets only its user read it.
    if len(parts) > 1:
        places = zip(names, parts, strict=True)
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: file for file, part in places for name in part},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _library() -> Any:
    try:
        import safetensors  # Takes a moment, for such files only.
    except ImportError as error:
        raise CheckpointError(
            "safetensors files need safetensors, which is not installed: pip install "
            "'meshwright[safetensors]'"
        ) from error
    return safetensors


def _main_file(folder: pathlib.Path) -> pathlib.Path:
    """The file that says where all tensors of a folder are."""
    for name in (INDEX, WHOLE):
        if (folder / name).is_file():
            return folder / name
    names = sorted(path.name for path in folder.glob(f"*{_ENDING}"))
    raise CheckpointError(
        f"{folder} has {', '.join(names[:3]) or 'no safetensors'}, but neither "
        f"{INDEX}, which says what is in which file, nor {WHOLE}: get what is missing, "
        "or name one file in InitializeFrom.checkpoint"
    )


def _opened(file: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    library = _library()
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}: see InitializeFrom.checkpoint")
    try:
        opened = stack.enter_context(library.safe_open(str(file), framework="np"))
        tensors = {}
        for name in opened.keys():  # noqa: SIM118  It is no mapping.
            cut = opened.get_slice(name)
            dtype = _DTYPES.get(cut.get_dtype(), cut.get_dtype().lower())
            form = ArraySpec(tuple(cut.get_shape()), dtype)
            tensors[name] = Tensor(name, form, str(file), cut)
        return tensors
    except Exception as error:  # Damage is SafetensorError, a subclass of Exception.
        raise _unreadable(str(file), error) from error


def _by_index(index: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """The tensors of all files that an index names, each from the file it says."""
    if not index.is_file():
        raise CheckpointError(
            f"there is no file {index}: see InitializeFrom.checkpoint"
        )
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map from names of tensors to files: take the index "
            "that was published with the files"
        )
    opened, tensors = {}, {}
    for name, part in weight_map.items():
        file = index.parent / str(part)
        if part != file.name:
            raise CheckpointError(
                f"{index} names {part!r}, which is no file beside it: put all its "
                "files into its folder"
            )
        if part not in opened:
            if not file.is_file():
                raise CheckpointError(
                    f"{index} names {part}, which is not there: get that file too"
                )
            opened[part] = _opened(file, stack)
        if name not in opened[part]:
            raise CheckpointError(
                f"{index} says that {part} has {name}, which it does not: the files "
                "are of different versions, get all of them again"
            )
        tensors[name] = opened[part][name]
    return tensors


def _json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
      CheckpointError: it holds something else.
    """
    try:
        if file.stat().st_size > _MAX_JSON:
            raise ValueError(f"it has more than {_MAX_JSON:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(str(file), error) from error
    if not isinstance(content, dict):
        raise _unreadable(str(file), ValueError("it is no JSON object"))
    return content


def _unreadable(file: str, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    text = " ".join(str(error).split())
    return CheckpointError(
        f"the file {file} cannot be read ({text[:300]}): it is damaged or was not "
        "fetched whole, get it again"
    )

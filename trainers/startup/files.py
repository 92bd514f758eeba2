"""Files to write and to read, checked before the work they are for."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from absl import flags
from etils import epath

_MOST_NAMED = 5
_CHECKPOINTS = "checkpoints"
"""The folder of a run with a folder for each step."""


def output_file(flag: flags.FlagHolder) -> pathlib.Path | None:
    """The file that a flag names, in a writable folder; None if it names none.

    Call it before the work whose result the file is for.

    Raises:
      ValueError: the file cannot be written.
    """
    if flag.value is None:
        return None
    path = pathlib.Path(flag.value).expanduser()
    reason = "it is a folder" if path.is_dir() else writable(path.parent)
    if reason:
        raise ValueError(
            f"--{flag.name}={flag.value} cannot be written ({reason}): name another "
            "file"
        )
    return path


def check_folder(flag: flags.FlagHolder) -> None:
    """Checks that the folder that a flag names can be made, and leaves nothing there.

    A folder that is not on a disk, such as `gs://...`, is not looked at.

    Raises:
      ValueError: files cannot be written there.
    """
    if flag.value is None or "://" in flag.value:
        return
    folder = pathlib.Path(flag.value).expanduser().absolute()
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=there):
            return
    except OSError as error:
        raise ValueError(
            f"--{flag.name}={flag.value} cannot be written "
            f"({(error.strerror or str(error)).lower()}): name another folder"
        ) from None


def check_saved(flag: flags.FlagHolder) -> None:
    """Checks that the run's folder that a flag names has a folder of checkpoints.

    Whether one in it is intact is not looked at, nor is what is not on a disk.

    Raises:
      ValueError: there is none.
    """
    if flag.value is None or "://" in flag.value:
        return
    folder = pathlib.Path(flag.value).expanduser().absolute() / _CHECKPOINTS
    if not folder.is_dir():
        raise ValueError(
            f"there is no checkpoint in {folder}: name the folder of a run that has "
            f"saved one by --{flag.name}, or train first{runs_near(folder)}"
        )


def runs_near(folder: epath.PathLike) -> str:
    """What to add to a message on a folder without checkpoints: what may be meant.

    That is the run of which the folder is a part, or runs in it; "" if there are none.
    """
    path = epath.Path(folder)
    path = path.parent if path.name == _CHECKPOINTS else path
    if path.name == _CHECKPOINTS:
        return f"; the run's own folder is {path.parent}"
    if path.name.isdigit() and path.parent.name == _CHECKPOINTS and path.exists():
        return f"; it is step {path.name} of the run {path.parent.parent}"
    if runs := sorted(each.parent.name for each in path.glob(f"*/{_CHECKPOINTS}")):
        more = ", ..." if runs[_MOST_NAMED:] else ""
        return f"; runs in {path}: {', '.join(runs[:_MOST_NAMED])}{more}"
    if list(path.glob("checkpoint_*/checkpoint")) or (path / "checkpoint").is_file():
        return (
            f"; {path} has checkpoints of T5X or TensorFlow, to start from by "
            "InitializeFrom as far as they are read"
        )
    return ""


def writable(folder: pathlib.Path) -> str:
    """Makes a folder; returns why files cannot be written there, "" if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()


@contextlib.contextmanager
def leaving_none_empty(path: str) -> Iterator[None]:
    """A context in which a folder may be made: at the end it is gone if it is empty.

    So are folders above it that were not there before, whoever made them since. A
    folder that is not on a disk, such as `gs://...`, is not looked at.
    """
    folder = pathlib.Path(path).expanduser().absolute()
    folders = [] if "://" in path else [folder, *folder.parents]
    made = [each for each in folders if not each.exists()]
    try:
        yield
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # It is not empty, or was never made.
                each.rmdir()

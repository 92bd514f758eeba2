"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path of the same name to write to; at the end its file replaces `path`.

    The folder must exist. A killed run leaves a folder beside the file that nothing
    reads; an exception leaves nothing.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="writing") as scratch:
        new = pathlib.Path(scratch, path.name)
        yield new
        new.replace(path)

"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path of the same name to write to; what is there at the end replaces `path`.

    The folder must be there. What an interrupted run leaves is a folder beside the file
    that nothing reads; of an exception nothing is left.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="writing") as scratch:
        new = pathlib.Path(scratch, path.name)
        yield new
        new.replace(path)

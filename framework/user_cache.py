"""Where files are kept that can be made again."""

from __future__ import annotations

import os
import pathlib
import tempfile


def user_cache(name: str) -> pathlib.Path:
    """`meshwright/NAME` in the user's cache folder; without a home, that for files
    that are temporary.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):  # There is neither HOME nor an entry for the user.
        cache = tempfile.gettempdir()
    return pathlib.Path(cache) / "meshwright" / name

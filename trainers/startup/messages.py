"""Messages on the terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any

import tqdm

_MOST_CHARACTERS = 5000
_LOG = logging.getLogger("absl")


def log_line(text: str, *args: Any) -> None:
    """Logs a line above the progress bar, if there is one."""
    with tqdm.tqdm.external_write_mode(file=sys.stderr):
        _LOG.info(text, *args)


def printable(text: str) -> str:
    """An error's text, escaped and not too long, whatever it quotes of a file."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}... ({len(text)} characters)"
    return escaped(text, kept="\n")


def escaped(text: str, *, kept: str) -> str:
    """`text` with what is not printable escaped, but for the characters of `kept`.

    On a terminal it might move the cursor, or change the window's title.
    """
    return "".join(c if c in kept or c.isprintable() else ascii(c)[1:-1] for c in text)

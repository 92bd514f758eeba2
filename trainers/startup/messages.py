"""Messages on the terminal."""

from __future__ import annotations

import contextlib
import logging as python_logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import tqdm
from absl import logging

_MOST_CHARACTERS = 5000
_WIDTH = 80
_SCREEN = {"ncols": _WIDTH, "nrows": 24}
# All of a long training's numbers are to fit on a screen: there is no percentage.
_LIVE = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# How often `told_bar` says where it is, on a terminal and elsewhere.
_CLOCK_SECONDS, _AGAIN_SECONDS = 1.0, 60.0
_LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} to go{postfix}"


class LogFormat(python_logging.Formatter):
    """Time, level and message.

    On a terminal, lines that are wider than a screen go on indented. In a file they
    stay whole, for those who search it.
    """

    def __init__(self):
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: python_logging.LogRecord) -> str:
        text = super().formatMessage(record)
        if not is_live():
            return text
        return "\n".join(part for line in text.splitlines() for part in _folded(line))


def _folded(line: str) -> list[str]:
    if len(line) <= _WIDTH:
        return [line]
    return textwrap.wrap(
        line,
        _WIDTH,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )


def log_line(text: str, *args: Any) -> None:
    """Logs a line above the progress bar, if there is one."""
    with tqdm.tqdm.external_write_mode(file=sys.stderr):
        logging.info(text, *args)


class _LogLines:
    """A file for tqdm that logs each state of a bar as a line, once.

    Args:
      is_printed: whether lines go to stderr and not to the log.
    """

    def __init__(self, *, is_printed: bool = False):
        self._last = ""
        self._is_printed = is_printed

    def write(self, text: str) -> None:
        text = text.strip()
        if text and text != self._last:  # A bar that ends writes once more.
            if self._is_printed:
                print(text, file=sys.stderr, flush=True)
            else:
                logging.info("%s", text)
            self._last = text

    def flush(self) -> None:
        pass


def is_live() -> bool:
    """Whether somebody watches: bars are redrawn on a terminal only."""
    return sys.stderr.isatty()


def _has_width() -> bool:
    """Whether the terminal says how wide it is: that of some containers says 0."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return True


def progress_bar(total: int, what: str, **settings: Any) -> tqdm.tqdm:
    """A live bar on a terminal; elsewhere, as in a log file, a line now and then.

    Args:
      total: how many there are to do.
      what: is being done.
      **settings: more of tqdm's.
    """
    if is_live():
        how = {"mininterval": 0.5, "bar_format": _LIVE}
        how |= {"dynamic_ncols": True} if _has_width() else _SCREEN
    else:
        # The delay leaves out the line before anything is done.
        how = {"mininterval": 15.0, "delay": 1e-9, "bar_format": _LINE}
        how["file"] = _LogLines()
    return tqdm.tqdm(total=total, desc=what, miniters=0, **(how | settings))


@contextlib.contextmanager
def told_bar(total: int, what: str, **settings: Any) -> Iterator[tqdm.tqdm]:
    """A `progress_bar` that also tells where it is while nothing is done.

    On a terminal its clock runs; elsewhere there is a line at least each minute, in the
    log, or on stderr where the log shows warnings alone.

    Args:
      total: how many there are to do.
      what: is being done.
      **settings: more of tqdm's.
    """
    beat = _CLOCK_SECONDS
    if not is_live():
        beat = _AGAIN_SECONDS
        shows = logging.get_absl_logger().isEnabledFor
        is_printed = shows(python_logging.WARNING) and not shows(python_logging.INFO)
        settings = {"file": _LogLines(is_printed=is_printed), **settings}
    with progress_bar(total, what, **settings) as bar:
        is_done = threading.Event()

        def tell() -> None:
            while not is_done.wait(beat):
                if time.time() - bar.last_print_t >= beat:
                    bar.refresh()

        teller = threading.Thread(target=tell, name=what, daemon=True)
        teller.start()
        try:
            yield bar
        finally:
            is_done.set()
            teller.join()


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

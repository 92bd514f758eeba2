"""Says on the terminal what a program that is being made waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import jax
from absl import logging

SILENT_SECONDS = 5.0
"""A program that is made in less time is not spoken of."""


@contextlib.contextmanager
def told_if_long(name: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that takes what is being done: stderr has it if it takes long.

    Process 0 alone speaks, and only where warnings are shown.
    """
    lock, is_late, stage = threading.Lock(), False, ""

    def say() -> None:
        is_shown = logging.get_verbosity() >= logging.WARNING
        if stage and is_shown and jax.process_index() == 0:
            print(f"{name}: {stage} ...", file=sys.stderr, flush=True)

    def begin(what: str) -> None:
        nonlocal stage
        with lock:
            stage = what
            if is_late:
                say()

    def late() -> None:
        nonlocal is_late
        with lock:
            is_late = True
            say()

    timer = threading.Timer(SILENT_SECONDS, late)
    timer.daemon = True
    timer.start()
    try:
        yield begin
    finally:
        timer.cancel()

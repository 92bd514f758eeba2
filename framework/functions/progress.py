"""Says on the terminal what a program that is being made waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
from absl import logging

SILENT_SECONDS = 5.0
"""A program that is made in less time is not spoken of."""
_AGAIN_SECONDS = 60.0


@contextlib.contextmanager
def told_if_long(name: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that takes what is being done: stderr has it if it takes long.

    Process 0 alone speaks, and only where warnings are shown.
    """
    lock, is_late, stage = threading.Lock(), False, ""
    start, is_made = time.monotonic(), threading.Event()

    def say(so_far: str = "") -> None:
        is_shown = logging.get_verbosity() >= logging.WARNING
        if stage and is_shown and jax.process_index() == 0:
            print(f"{name}: {stage} ...{so_far}", file=sys.stderr, flush=True)

    def begin(what: str) -> None:
        nonlocal stage
        with lock:
            stage = what
            if is_late:
                say()

    def watch() -> None:
        nonlocal is_late
        if is_made.wait(SILENT_SECONDS):
            return
        with lock:
            is_late = True
            say()
        while not is_made.wait(_AGAIN_SECONDS):
            with lock:
                say(f" {round((time.monotonic() - start) / 60)} min so far")

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield begin
    finally:
        is_made.set()

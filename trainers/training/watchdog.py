"""Dumps a process's stacks when a step takes far longer than steps do."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import logging
import statistics
import tempfile
import threading
import time

import jax
from etils import epath

log = logging.getLogger("absl")

_KNOWN = 5
"""The number of calls that must have ended for their median to mean something."""
_REMEMBERED = 100
_LEAST_SECONDS = 10.0


class Watchdog(contextlib.AbstractContextManager):
    """Writes the stacks of all Python threads while a call takes too long.

    It writes once for each such call, into a file of `folder`; the training goes on.

    Args:
      folder: a local path, or `gs://...`; made when it is needed.
      factor: a call takes too long when it takes `factor` times the median of earlier
        calls, and 10 s; None: never.
    """

    def __init__(self, folder: str, factor: float | None):
        self._folder = epath.Path(folder)
        self._factor = factor
        self._seconds: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._step = 0
        self._since: float | None = None  # None: no call is under way.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog")
        self._thread.daemon = True

    def __enter__(self) -> Watchdog:
        if self._factor is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._ended.set()

    def ended(self, step: int, seconds: float) -> None:
        """Notes a call's time, whose last step is `step`; the next is under way."""
        self._seconds.append(seconds)
        self._step, self._since = step, time.monotonic()

    def rest(self) -> None:
        """Stops watching until `resume`, or until the next call has ended."""
        self._since = None

    def resume(self) -> None:
        """Watches again: a call is under way."""
        self._since = time.monotonic()

    def _watch(self) -> None:
        written_of = None
        while not self._ended.wait(1.0):
            since, known = self._since, list(self._seconds)
            if since is None or since == written_of or len(known) < _KNOWN:
                continue
            usual = statistics.median(known)
            waited = time.monotonic() - since
            if waited > max(self._factor * usual, _LEAST_SECONDS):
                written_of = since
                self._write(waited, usual)

    def _write(self, waited: float, usual: float) -> None:
        name = f"after_step_{self._step}_process_{jax.process_index()}.txt"
        path = self._folder / name
        try:
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                self._folder.mkdir(parents=True, exist_ok=True)
                path.write_text(file.read())
        except OSError as error:
            log.warning("stacks cannot be written to %s: %s", path, error)
        log.warning(
            "what comes after step %d takes %.0f s so far, and usually %.2f s; what "
            "all threads are doing: %s",
            self._step,
            waited,
            usual,
            path,
        )

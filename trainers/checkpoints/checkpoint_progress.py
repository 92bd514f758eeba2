"""Logs now and then how far a long save or restore has come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import tensorstore as ts

from meshwright.framework.compiler.xla.processes import is_first_process
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.startup.messages import log_line


class Transfer:
    """A context that logs now and then how many bytes of a file transfer are done.

    A transfer that ends within the first interval logs nothing. The first process logs
    for all.

    Args:
      what: what is being done, such as "saving step 5".
      total: bytes to transfer.
      done: returns the bytes done so far, from any start; if None, `add` counts them.
    """

    interval = 15.0  # seconds

    def __init__(self, what: str, total: int, *, done: Callable[[], int] | None = None):
        self._what, self._total = what, total
        self._added, self._lock = 0, threading.Lock()
        self._done = done or (lambda: self._added)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._begin = self._done()

    def __enter__(self) -> Transfer:
        self.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.end()

    def start(self) -> None:
        """Begins to watch, until `end`."""
        self._clock = time.perf_counter()
        if is_first_process():
            self._thread.start()

    def end(self) -> None:
        """Ends the watch, in whatever thread; may be called again."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, count: int) -> None:
        """Counts bytes done; for any thread."""
        with self._lock:
            self._added += count

    def _watch(self) -> None:
        has_logged = False
        while not self._ended.wait(self.interval):
            done, rate = self._so_far()
            log_line(
                "%s: %s of %s, %s/s",
                self._what,
                bytes_text(min(done, self._total)),
                bytes_text(self._total),
                bytes_text(rate),
            )
            has_logged = True
        if has_logged:
            done, rate = self._so_far()
            done, rate = map(bytes_text, (done, rate))
            log_line("%s: ended, %s at %s/s", self._what, done, rate)

    def _so_far(self) -> tuple[int, float]:
        done = self._done() - self._begin
        return done, done / (time.perf_counter() - self._clock)


def bytes_here(state: NestedMap) -> int:
    """Bytes of arrays, real or abstract, in the memory of this process."""
    total = 0
    for leaf in state.leaves():
        places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        shard = leaf.sharding.shard_shape(leaf.shape)
        copies_aside = len({str(place) for place in places})
        total += copies_aside * int(np.prod(shard)) * leaf.dtype.itemsize
    return total


def bytes_written() -> int:
    """Bytes that TensorStore wrote in this process, to disks and buckets."""
    return _counted("bytes_written")


def bytes_read() -> int:
    """Bytes that TensorStore read in this process, from disks and buckets."""
    return _counted("bytes_read")


def _counted(name: str) -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(
        cell.get("value", 0)
        for metric in metrics
        if metric["name"].endswith(f"/{name}")
        for cell in metric["values"]
    )

"""Ends a process whose devices wait for each other for ever, and reports it.

A call that waits on XLA's CPU devices cannot be interrupted, and XLA's own end comes
after 20 minutes, since with more virtual devices than cores a long wait may be load.
The threads distinguish standing still from being slow: on a loaded machine some want to
run, or have run; when all devices wait for each other, none does.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import pathlib
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from meshwright.framework.compiler.program import Program

STATUS = os.EX_SOFTWARE
"""Exit status of a process that is ended here."""
_THREADS = pathlib.Path("/proc/self/task")
_INSPECTIONS = 12
"""The number of inspections in a row that see nothing run before it is a standstill."""
_RUNNING = "RDTt"  # It wants to run, waits for a disk, or is held by a debugger.
_LISTED = 40
_SAYING_SECONDS = 10.0

_seconds: float | None = 60.0
_watched: weakref.WeakSet[Calls] = weakref.WeakSet()
_lock = threading.Lock()
# While 32 calls are in flight, each further call holds an XLA thread for each device
# until one of them ends: from one Python thread at a time, there are enough threads.
_calling = threading.RLock()


def set_limit(seconds: float | None) -> None:
    """Sets after how many seconds of standing still the process ends; None: never."""
    global _seconds
    _seconds = seconds


class Calls:
    """The calls of a program, some of which may be under way.

    Args:
      program: the program.
    """

    def __init__(self, program: Program):
        self.program = weakref.ref(program)
        self.inside: set[int] = set()
        """The Python threads that are making a call now."""
        self._last: Callable[[], jax.Array | None] = lambda: None

    def make(self, compiled: Callable[..., Sequence[Any]], args: Iterable[Any]):
        """Makes a call, and remembers it."""
        thread = threading.get_ident()
        with _calling:
            self.inside.add(thread)
            try:
                results = compiled(*args)
            finally:
                self.inside.discard(thread)
        if results:
            self._last = weakref.ref(results[0])
        return results

    def under_way(self) -> bool:
        """Whether a call is under way."""
        last = self._last()
        try:
            waits = last is not None and not last.is_ready()
        except RuntimeError:  # A later call took the result over, and waits for it.
            waits = False
        return waits or bool(self.inside)


def calls_of(program: Program) -> Calls | None:
    """The calls of a program over CPU devices; None on other devices, or on only one.

    They are watched, except where a call may rightly wait for another process, which
    the trainer watches, and where threads cannot be seen.
    """
    runs = program.can_run and program.mesh.size > 1
    if not runs or jax.default_backend() != "cpu":
        return None
    calls = Calls(program)
    if jax.process_count() == 1 and _THREADS.is_dir():
        with _lock:
            _watched.add(calls)
        _start()
    return calls


@functools.cache
def _start() -> None:
    threading.Thread(target=_watch, name="standstill", daemon=True).start()


def _watch() -> None:
    before, still = None, 0
    while True:
        limit = _seconds
        interval = (limit or 60.0) / _INSPECTIONS
        time.sleep(interval)
        with _lock:
            busy = [calls for calls in _watched if calls.under_way()]
        if limit is None or not busy:
            before, still = None, 0
            continue
        now = _ticks({thread for calls in busy for thread in tuple(calls.inside)})
        # Threads of no device may run for 1% of the time: a tick is 10 ms.
        idle = max(1.0, interval)
        stands = before is not None and now is not None and now - before <= idle
        before, still = now, still + 1 if stands else 0
        if still == _INSPECTIONS:
            _end([calls.program() for calls in busy], limit)


def _ticks(calling: set[int]) -> int | None:
    """Processor time of XLA's threads so far, in clock ticks; None if some run.

    Python's own threads, which may load data meanwhile, do not count, unless they are
    `calling` a program.
    """
    uncounted = {
        str(thread.native_id)
        for thread in threading.enumerate()
        if thread.ident not in calling
    }
    total = 0
    for folder in _THREADS.iterdir():
        if folder.name in uncounted:
            continue
        try:
            # The thread's name, which comes before, may have spaces and brackets.
            state, *numbers = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # The thread has ended.
        if state in _RUNNING:
            return None
        total += int(numbers[10]) + int(numbers[11])
    return total


def _end(programs: Sequence[Program | None], seconds: float) -> None:
    """Reports what stands still, and ends this process."""
    # A thread that holds a lock may never release it: the end does not wait for that.
    saying = threading.Thread(target=_say, args=(programs, seconds), daemon=True)
    saying.start()
    saying.join(_SAYING_SECONDS)
    os._exit(STATUS)


def _say(programs: Sequence[Program | None], seconds: float) -> None:
    for text in (_text(p, seconds) for p in programs if p is not None):
        print(text, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    sys.stdout.flush()
    logging.shutdown()


def _text(program: Program, seconds: float) -> str:
    devices = ", ".join(str(number) for number in program.mesh.ids.flat)
    try:
        waits = _collective_lines(program)
    except Exception as error:  # The process ends: it reports as much as it can.
        waits = [f"(its collectives cannot be read: {error})"]
    threads = os.environ.get("PJRT_NPROC")
    paragraphs = (
        f"{program.name}: a call stands still: for {seconds:.0f} s none of XLA's "
        f"threads has run. Devices {devices} of mesh ({program.mesh}) wait for each "
        "other in some of these collectives:",
        *(f"  {line}" for line in waits),
        "Either some devices never reach one: have the branch or loop of a manual "
        "region that it is in decide the same on all devices.",
        f"Or threads are short: XLA has PJRT_NPROC = {threads} in each pool. Raise it, "
        "or leave it to set_platform, or wait for results before more calls are made.",
        "The process ends here; set_platform(..., standstill_seconds=None) lets it "
        "wait.",
    )
    return "\n".join(map(_folded, paragraphs))


def _folded(paragraph: str) -> str:
    how = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(paragraph, 80, subsequent_indent="    ", **how)


def _collective_lines(program: Program) -> list[str]:
    collectives = program.collectives()
    lines = []
    for c in collectives[:_LISTED]:
        source = program.sources.find(c.op_name)
        along = " and ".join(c.axes) if c.axes else "parts of the mesh"
        where = f" at {source}" if source and source.file else ""
        lines.append(f"{c.kind} {c.name} along {along}: {c.op_name}{where}")
    if len(collectives) > _LISTED:
        lines.append(f"and {len(collectives) - _LISTED} more")
    return lines or ["none: they wait for something else"]

"""Cases judged in another process: where XLA ends it, the tests go on."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import traceback
from collections.abc import Sequence

from meshwright.framework import set_platform
from meshwright.framework.compiler.program import Partitioner
from tests.operators.cases import Case, run


class ProcessEndedError(Exception):
    """The process ended on these cases."""


def complaints(cases: Sequence[Case], partitioner: Partitioner) -> list[str | None]:
    """What is wrong with each case, all run in one program.

    Raises:
      ProcessEndedError: it ended the process. The next call starts another.
      Exception: as the program raised it there.
    """
    listed = "\n".join(map(str, cases))
    process, pipe = _judge()
    pipe.send((cases, partitioner))
    try:
        found = pipe.recv()
    except EOFError:
        _judge.cache_clear()
        process.join()
        if process.exitcode >= 0:
            raise RuntimeError(f"the process left with {process.exitcode}") from None
        by = signal.Signals(-process.exitcode).name
        raise ProcessEndedError(f"the process ended by {by}:\n{listed}") from None
    if isinstance(found, Exception):
        found.add_note(listed)
        raise found
    return found


@functools.cache
def _judge():
    context = multiprocessing.get_context("spawn")  # A fork lacks JAX's threads.
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # Else no end of the process would be seen here.
    return process, ours


def _serve(pipe) -> None:
    set_platform("cpu", 8)
    while True:
        try:
            cases, partitioner = pipe.recv()
        except EOFError:  # The tests are over.
            return
        try:
            found = run(cases, partitioner)
            answer = [c.complaint(f) for c, f in zip(cases, found, strict=True)]
        except Exception as e:
            e.add_note(traceback.format_exc())  # Tracebacks do not travel.
            answer = e
        pipe.send(answer)

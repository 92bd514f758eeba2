"""A command in a child process, so that a compiler that ends it ends in one message.

libtpu ends its process by an abort where a check of its own fails, with a page of C++
frames. The parent imports nothing that is large, and does nothing but wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from meshwright.trainers.startup.messages import printable

_STDERR = 2
_PR_SET_PDEATHSIG = 1
_SHOWN = 300
_ENDINGS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

# Where the child's C++ writes while it compiles, for the parent to read.
_output: BinaryIO | None = None


def call(main: Callable[[], int | None], name: str, advice: str) -> int | None:
    """Calls `main` in a child process, and returns the exit status.

    To be called before TensorFlow or JAX are imported, whose threads a fork loses. In
    the child it returns what `main` returns, or raises what it raises.

    Args:
      main: the command.
      name: its name, for the message.
      advice: what the message says where the child ends by a signal.
    """
    global _output
    with tempfile.TemporaryFile() as output:
        parent, child = os.getpid(), os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # It ended before that.
                os._exit(1)
            _output = output
            return main()
        with _passing_signals_to(child):
            _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            sys.stdout.flush()
            os._exit(code)  # The child has done what is done at exit.
        if -code in _ENDINGS:  # Somebody ended it: so is this process to end.
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        output.seek(0)
        text = output.read().decode(errors="replace")
    how = signal.Signals(-code).name
    failed = re.search(r"Check failed.*", text)
    why = f" ({printable(failed[0])[:_SHOWN]})" if failed else ""
    print(f"{name}: its process ended by {how}{why}: {advice}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Has what C++ writes to stderr wait until the context ends, in a child of `call`.

    If the process ends before, its parent has it.
    """
    if _output is None:
        yield
        return
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    os.dup2(_output.fileno(), _STDERR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, _STDERR)
        os.close(kept)
        _output.seek(0)
        with os.fdopen(_STDERR, "wb", closefd=False) as stderr:
            stderr.write(_output.read())
        _output.seek(0)
        _output.truncate()


@contextlib.contextmanager
def _passing_signals_to(child: int) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    handlers = {
        signal.SIGTERM: pass_on,
        signal.SIGINT: lambda *_: None,  # A terminal gives it to the child itself.
    }
    before = {number: signal.signal(number, to) for number, to in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

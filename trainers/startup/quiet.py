"""Keeps a binary's terminal free of TensorFlow's lines while that comes up.

TF's and absl's C++ write to the file descriptor of stderr before any log level counts.
A process reads it for a while, drops the known lines, and passes on the rest at once,
so that none is lost, whatever becomes of this process. This file is both sides: it is
imported by the binaries, and run as a script by that process.

Of what TF's C++ logs through its own levels only errors are shown, from the import on:
its information and its warnings are dropped, known or not, unless the user sets
TF_CPP_MIN_LOG_LEVEL. They come throughout a run, when nothing reads along any more, and
tell of TF's own executors. What stops a run is raised in Python.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

_STDERR = 2
_ENDING_SECONDS = 10  # In vain where a child process has kept the descriptor.
KNOWN = (
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    r"to STDERR",
    r".* cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, .*",
    r".* cuda_platform\.cc:\d+\] failed call to cuInit: .*",
    r".* cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized .*",
    r"To enable the following instructions: .*, rebuild TensorFlow .*",
    r".* port\.cc:\d+\] oneDNN custom operations are on\. .*",
)
"""The lines that are dropped, as regular expressions for a line in full."""


@contextlib.contextmanager
def importing_tensorflow() -> Iterator[bool]:
    """Imports TensorFlow, and then what the context imports, without their messages.

    Yields whether there was anything to do: not if TensorFlow is imported already.
    """
    if "tensorflow" in sys.modules:
        yield False
        return
    # Before TF is imported, which reads it then; a user's setting takes precedence.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with _filtered():
        with _without_keras():
            import tensorflow  # noqa: F401
        yield True


def look_for_devices() -> None:
    """Has TensorFlow look for GPUs, without messages that there is no driver."""
    import tensorflow as tf

    with _filtered():
        tf.config.list_physical_devices()


@contextlib.contextmanager
def _without_keras() -> Iterator[None]:
    """Leaves Keras to programs that use `tf.keras`, which import it when they do.

    Keras takes in matplotlib, together a second; TF goes on where it cannot have Keras.
    """
    part = "keras.src"
    if "keras" in sys.modules:
        yield
        return
    sys.modules[part] = None
    try:
        yield
    finally:
        del sys.modules[part]


@contextlib.contextmanager
def _filtered() -> Iterator[None]:
    """All that is written to stderr, by whomever, goes through `_pass_on`."""
    try:
        terminal = os.dup(_STDERR)
    except OSError:  # It is closed.
        yield
        return
    reader = subprocess.Popen(
        [sys.executable, "-IS", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process to handle.
    )
    _flush()
    os.dup2(reader.stdin.fileno(), _STDERR)
    reader.stdin.close()
    try:
        yield
    finally:
        _flush()
        os.dup2(terminal, _STDERR)
        os.close(terminal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(_ENDING_SECONDS)


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def _pass_on() -> None:
    """Runs in the reading process, until nobody can write any more."""
    known = re.compile("|".join(KNOWN))
    for line in sys.stdin.buffer:
        if not known.fullmatch(line.decode(errors="replace").rstrip("\r\n")):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def drop_output() -> None:
    """Writes no more to stdout, whose reader, such as `head`, has enough.

    Python would flush it once more at last, and fail.
    """
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    _pass_on()

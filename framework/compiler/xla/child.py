"""A child process in which XLA compiles, so that this process lives if XLA ends it.

This file is both sides of a connection: it is imported where the program is, and run as
a script by the child. The child imports JAX alone, as TensorFlow takes far longer to
start. It serves one compile after another, and ends with the process that started it.
Only bytes cross, never pickled objects: nothing that is read is run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe

_ENDING_SECONDS = 60  # For a child to end after its connection: it may dump core.
_LINES = 3
_COMPILED, _REFUSED = b"compiled", b"refused"
# XLA's message on a check that failed; and lines without it: C++ frames, warnings.
_FATAL = re.compile(r"^F\d{4} |Check failed")
_ASIDE = re.compile(r"^(@|\*\*\*|#\d|[IW]\d{4} |WARNING: )")


class ChildEnded(Exception):  # noqa: N818 (no error of ours; `refusals.of_child` is)
    """The child ended while it compiled; the message says how, and its last output."""


class ChildRefused(Exception):  # noqa: N818
    """XLA refuses the program, with the message that it would have in this process."""


class Child:
    """A process that compiles for CPU devices like those of this process.

    Args:
      devices: how many CPU devices there are.
    """

    def __init__(self, devices: int):
        self._devices = devices
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def compile(self, module: bytes, options: bytes, devices: Sequence[int]) -> bytes:
        """Compiles a program. If an earlier one ended the child, another is started.

        Args:
          module: StableHLO, as MLIR bytecode.
          options: JAX's `CompileOptions`, serialized.
          devices: numbers of the devices that it is for.

        Returns:
          The serialized executable.

        Raises:
          ChildEnded: XLA ended the child.
          ChildRefused: XLA refuses the program.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # It was killed while idle, perhaps for want of memory.
            if self._process is None:
                self._start()
            try:
                for part in (json.dumps(list(devices)).encode(), options, module):
                    self._connection.send_bytes(part)
                refused = self._connection.recv_bytes() == _REFUSED
                answer = self._connection.recv_bytes()
            except (EOFError, OSError):
                raise ChildEnded(self._last_words()) from None
            except BaseException:
                self._end()  # Such as Ctrl-C: its answer would be the next call's.
                raise
            output = self._new_output()
            if output and sys.stderr is not None:
                sys.stderr.write(output)
        if refused:
            raise ChildRefused(answer.decode())
        return answer

    def _start(self) -> None:
        # A file rather than a pipe, which nobody would empty while the child compiles.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as the child)
        self._read = 0
        self._connection, end = Pipe()  # Closed by the end of this process.
        with end:
            self._process = subprocess.Popen(
                # -P: the modules next to this one have names that others have too.
                [sys.executable, "-P", __file__, str(end.fileno()), str(self._devices)],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process to handle.
            )

    def _end(self) -> int:
        self._process.kill()
        status = self._process.wait()
        self._connection.close()
        self._process = None
        return status

    def _new_output(self) -> str:
        """What the child wrote since the last call."""
        # Reading at an offset leaves alone the child's own, where it goes on writing.
        size = os.fstat(self._errors.fileno()).st_size - self._read
        output = os.pread(self._errors.fileno(), size, self._read)
        self._read += size
        return output.decode(errors="replace")

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)
        status = self._end()
        how = f"with status {status}"
        if status < 0:
            how = f"by signal {-status}"
            with contextlib.suppress(ValueError):  # Real-time signals have no names.
                how = f"by {signal.Signals(-status).name}"
        output = self._new_output()
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        kept = [line for line in lines if _FATAL.search(line)]
        kept = kept or [line for line in lines if not _ASIDE.match(line)][-_LINES:]
        return f"{how}: {' / '.join(kept) or 'it printed nothing'}"


def child(devices: int) -> Child:
    """The child of this process for `devices` devices; it starts at the first compile.

    Args:
      devices: how many CPU devices this process has.
    """
    # A fork of this process has copies of connections that belong to this process.
    return _child(devices, os.getpid())


@functools.cache
def _child(devices: int, process: int) -> Child:
    return Child(devices)


def _serve(connection: Connection, devices: int) -> None:
    """The child's work: it compiles requests until the connection ends."""
    import jax  # Imported here, as the parent's import of this file does without it.
    from jaxlib import _jax

    requests: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(connection, requests))
    listener.daemon = True
    listener.start()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    by_number = {device.id: device for device in jax.devices()}
    client = jax.devices()[0].client
    while True:
        numbers, options, module = requests.get()
        chosen = [by_number[number] for number in json.loads(numbers)]
        try:
            parsed = _jax.CompileOptions.ParseFromString(options)
            executable = client.compile_and_load(module, chosen, parsed)
            answer = _COMPILED, executable.serialize()
        except jax.errors.JaxRuntimeError as error:
            answer = _REFUSED, str(error).encode()
        for part in answer:
            connection.send_bytes(part)


def _listen(connection: Connection, requests: queue.SimpleQueue) -> None:
    try:
        while True:
            requests.put([connection.recv_bytes() for _ in range(3)])
    except (EOFError, OSError):  # The other process has ended, and so do compiles.
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))

"""Hostile files are read in a process of their own, watched and with little memory."""

from __future__ import annotations

import dataclasses
import enum
import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping

SECONDS = 120
"""After which a case hangs; all but a few end within a hundredth of one."""

ROOM = 2**30
"""Bytes that reading may allocate, beyond what the process needs to start."""

# What no reader has a reason to do. Importing a module, of which the first use of a
# library does much, raises none of these.
_FORBIDDEN = (
    "pickle.find_class",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.spawn",
    "os.system",
    "shutil.",
    "socket.connect",
    "subprocess.Popen",
    "webbrowser.open",
)


class Ending(enum.Enum):
    """How reading a case ended."""

    READ = "read"
    REFUSED = "refused"  # By an error that the binaries print by its message.
    RAISED = "raised"  # By any other.
    DIED = "died"
    HUNG = "hung"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case.

    Args:
      ending: how it ended.
      message: of the error, or how the process ended.
      traceback: of an error.
      did: forbidden things that were done on the way.
    """

    ending: Ending
    message: str = ""
    traceback: str = ""
    did: tuple[str, ...] = ()


def read(reader: str, files: Mapping[str, bytes]) -> Outcome:
    """What a reader makes of a folder with these files.

    Args:
      reader: its name in `tests.fuzz.readers.READERS`.
      files: contents by path below the folder.
    """
    ended = _read_once(reader, files)
    if ended.ending is Ending.DIED:
        # A child may be short of memory by what it read before, and die of that: what
        # is the reader's fault kills a new one too.
        ended = _read_once(reader, files)
    return ended


def _read_once(reader: str, files: Mapping[str, bytes]) -> Outcome:
    process, pipe = _child()
    pipe.send((reader, dict(files)))
    try:
        if pipe.poll(SECONDS):
            return pipe.recv()
        ended = Outcome(ending=Ending.HUNG, message=f"hung for {SECONDS} s")
    except (EOFError, ConnectionError):
        process.join()
        by = process.exitcode
        how = signal.Signals(-by).name if by < 0 else f"status {by}"
        ended = Outcome(ending=Ending.DIED, message=f"the process ended by {how}")
    process.kill()
    process.join()
    _child.cache_clear()
    return ended


@functools.cache
def _child():
    # A fork would have the threads of TensorFlow and JAX only in part.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # Else no end of the process would be seen here.
    ours.recv()  # It is ready, which takes as long as it takes.
    return process, ours


def _serve(pipe) -> None:
    from tests.fuzz.readers import READERS, forget
    from tests.fuzz.valid import VALID

    watch = Watch()
    for name, files in VALID.items():  # What libraries load late, they load now.
        outcome(READERS[name], files, watch)
    # A codec that a file names is imported late: no writing of the reader's.
    sys.dont_write_bytecode = True
    _limit_memory()
    pipe.send("ready")
    while True:
        try:
            name, files = pipe.recv()
        except EOFError:  # The tests are over.
            return
        pipe.send(outcome(READERS[name], files, watch))
        forget()


def outcome(reader, files: Mapping[str, bytes], watch: Watch) -> Outcome:
    """What a reader of `READERS` makes of files, in this process."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        for name, content in files.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        here = os.getcwd()
        os.chdir(folder)
        watch.begin()
        ending, message, trace = Ending.READ, "", ""
        try:
            reader(pathlib.Path(folder))
        except Exception as error:
            declared = isinstance(error, ValueError | OSError)
            ending = Ending.REFUSED if declared else Ending.RAISED
            message = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
        finally:
            did = watch.end()
            os.chdir(here)
    return Outcome(ending=ending, message=message, traceback=trace, did=did)


class Watch:
    """Notes forbidden things while a reader runs; hooks of Python stay for good."""

    def __init__(self):
        self._did: list[str] | None = None
        sys.addaudithook(self._note)

    def begin(self) -> None:
        self._did = []

    def end(self) -> tuple[str, ...]:
        did, self._did = self._did, None
        return tuple(did)

    def _note(self, event: str, args: tuple) -> None:
        if self._did is None:
            return
        writes = (
            event == "open" and isinstance(args[1], str) and set(args[1]) & {*"wax+"}
        )
        if writes or event.startswith(_FORBIDDEN):
            self._did.append(f"{event} {args!r}"[:200])


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    import resource

    status = pathlib.Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM, used + ROOM))

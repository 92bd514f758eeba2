"""Signals that ask a run to stop, for it to save and leave cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from meshwright.trainers.processes.peers import Peers

_STOPS = (signal.SIGTERM, signal.SIGINT)
_wakeups: list[socket.socket] = []
"""What signals are written to, of this process."""


class StopRequest:
    """Whether, and by which signal, the run is to stop.

    Args:
      peers: the processes that stop together with this one, or None.
      leave: ends the process at once, given the signal; see `leave`.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        leave: Callable[[int], object] | None = None,
    ):
        self.leave = leave if peers is None else None
        """Called on a signal while nothing can be lost; None from the first step on."""
        self.received: int | None = None
        """The signal that this process received."""
        self.signal: int | None = None
        """The signal that ends the run, which some process got."""
        self.has_steps = False
        """Whether steps have been made that a stop saves."""
        self._peers = peers

    @property
    def is_asked(self) -> bool:
        """Whether this process got a signal, or knows that another did."""
        return self.received is not None or self.signal is not None

    def reached(self) -> bool:
        """Whether to stop here; to be called before each unit of work.

        All processes call it before the same units, and get the same answer.
        """
        if self.signal is None:
            peers, received = self._peers, self.received
            self.signal = received if peers is None else peers.stop_reached(received)
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals(
    peers: Peers | None = None, leave: Callable[[int], object] | None = None
) -> Iterator[StopRequest]:
    """Turns SIGTERM and Ctrl-C into a request while the context lasts.

    A signal that one process gets stops all `peers`. A process by itself is ended by
    `leave`, in another thread, as long as the request has that.

    A Ctrl-C after that interrupts at once. Further SIGTERMs change nothing: `timeout`
    and others send two. Outside the main thread, which alone gets signals, nothing is
    ever requested.
    """
    request = StopRequest(peers, leave)

    def on_signal(signum, frame):
        if request.leave is not None:
            request.received = signum  # In case a step comes first.
        elif request.received is None:
            request.received = signum
            how = "with nothing to save"
            if request.has_steps:
                how = "after the call under way, to save"
            name = signal.Signals(signum).name
            _write(f"\n{name}: stopping {how}; Ctrl-C quits at once\n")
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        # The main thread alone can do both.
        with contextlib.suppress(ValueError):
            for number in _STOPS:
                before = signal.signal(number, on_signal)
                stack.callback(signal.signal, number, before)
            if request.leave is not None:
                stack.enter_context(_leaving(request))
        yield request


@contextlib.contextmanager
def _leaving(request: StopRequest) -> Iterator[None]:
    """Calls `request.leave`, while there is one, whatever the main thread does.

    Python runs handlers between two of its own instructions, so not before XLA has
    compiled; but each signal writes its number to the wakeup file at once.
    """
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    _wakeups.append(writes)
    before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)

    def watch():
        while number := reads.recv(1):  # Empty when the other end is closed.
            if number[0] in _STOPS and (leave := request.leave) is not None:
                leave(number[0])

    thread = threading.Thread(target=watch, name="stop signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _wakeups.remove(writes)
        writes.close()
        thread.join()
        reads.close()


def _forget_wakeups() -> None:
    """In a child by fork, whose signals are not for this process, such as a pool's."""
    if _wakeups:
        signal.set_wakeup_fd(-1)
    while _wakeups:
        _wakeups.pop().close()


os.register_at_fork(after_in_child=_forget_wakeups)


def _write(text: str) -> None:
    # The signal may have come in the middle of a print, which cannot be entered twice.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())

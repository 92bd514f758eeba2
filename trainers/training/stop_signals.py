"""Signals that ask a run to stop, for it to save and leave cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from meshwright.trainers.processes.peers import Peers


class StopRequest:
    """Whether, and by which signal, the run is to stop.

    Args:
      peers: the processes that stop together with this one, or None.
    """

    def __init__(self, peers: Peers | None = None):
        self.received: int | None = None
        """The signal that this process received."""
        self.signal: int | None = None
        """The signal that ends the run, which some process got."""
        self.has_steps = False
        """Whether steps have been made that a stop saves."""
        self._peers = peers

    def reached(self) -> bool:
        """Whether to stop here; to be called before each unit of work.

        All processes call it before the same units, and get the same answer.
        """
        if self.signal is None:
            peers, received = self._peers, self.received
            self.signal = received if peers is None else peers.stop_reached(received)
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals(peers: Peers | None = None) -> Iterator[StopRequest]:
    """Turns SIGTERM and Ctrl-C into a request while the context lasts.

    A signal that one process gets stops all `peers`.

    A Ctrl-C after that interrupts at once. Further SIGTERMs change nothing: `timeout`
    and others send two. Outside the main thread, which alone gets signals, nothing is
    ever requested.
    """
    request = StopRequest(peers)

    def on_signal(signum, frame):
        if request.received is None:
            request.received = signum
            how = "with nothing to save"
            if request.has_steps:
                how = "after the call under way, to save"
            name = signal.Signals(signum).name
            _write(f"\n{name}: stopping {how}; Ctrl-C quits at once\n")
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    handled = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            handled[number] = signal.signal(number, on_signal)
    except ValueError:  # Not in the main thread.
        pass
    try:
        yield request
    finally:
        for number, before in handled.items():
            signal.signal(number, before)


def _write(text: str) -> None:
    # The signal may have come in the middle of a print, which cannot be entered twice.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())

"""Signals that ask a run to stop, for it to save and leave cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from meshwright.trainers.processes.peers import Peers


class StopRequest:
    """Whether, and by which signal, the run was asked to stop.

    Args:
      peers: the processes that stop together with this one, or None.
    """

    def __init__(self, peers: Peers | None = None):
        self.asked: int | None = None
        """The signal that this process got."""
        self.signal: int | None = None
        """The signal that ends the run, which some process got."""
        self._peers = peers

    def reached(self) -> bool:
        """Whether to stop here; asked before each unit of work.

        All processes ask before the same ones, and get the same answer.
        """
        if self.signal is None:
            peers, asked = self._peers, self.asked
            self.signal = asked if peers is None else peers.stop_reached(asked)
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals(peers: Peers | None = None) -> Iterator[StopRequest]:
    """Turns SIGTERM and Ctrl-C into a request while the context lasts.

    One process that gets a signal stops all `peers`.

    A Ctrl-C after that interrupts at once. Further SIGTERMs change nothing: `timeout`
    and others send two. Outside of the main thread, which alone gets signals, nothing
    ever is requested.
    """
    request = StopRequest(peers)

    def on_signal(signum, frame):
        if request.asked is None:
            request.asked = signum
            _write(
                f"\n{signal.Signals(signum).name}: stopping after the call under way, "
                "to save; Ctrl-C quits at once\n"
            )
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    handled = {}
    try:
        for one in (signal.SIGTERM, signal.SIGINT):
            handled[one] = signal.signal(one, on_signal)
    except ValueError:  # Not in the main thread.
        pass
    try:
        yield request
    finally:
        for one, before in handled.items():
            signal.signal(one, before)


def _write(text: str) -> None:
    # The signal may have come in the middle of a print, which cannot be entered twice.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())

"""Signals that ask a run to stop, for it to save and leave cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    signal: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM and Ctrl-C into a request while the context lasts.

    A Ctrl-C after that interrupts at once. Further SIGTERMs change nothing: `timeout`
    and others send two. Outside of the main thread, which alone gets signals, nothing
    ever is requested.
    """
    request = StopRequest()

    def on_signal(signum, frame):
        if not request.requested:
            request.signal = signum
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

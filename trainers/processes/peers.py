"""The processes of one training, as each of them sees the others.

Each talks to its `supervisor`, and through it to process 0 (`peer_hub`): it learns
which processes are missing at the start, and after which step all are to stop.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from typing import NoReturn

from meshwright.trainers.processes.peer_channel import (
    MAX_TEXT,
    Channel,
    ChannelClosedError,
)

log = logging.getLogger("absl")

LOST = os.EX_TEMPFAIL
"""Exit status of a process that lost a peer: the same command may be started again."""

_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 10.0


class PeerError(RuntimeError):
    """The processes of a training did not come together."""


class Peers:
    """This process among all `count` processes of a training, which have answered.

    Args:
      channel: the channel to the supervisor.
      count: number of processes.
      process: this process's number.
      settings: lines of text that must be the same in all processes.
      versions: the packages' versions, which must be the same in all processes.
      start_timeout: seconds to wait for the others.

    Raises:
      PeerError: some processes have not come in time, or this one was refused.
    """

    def __init__(
        self,
        channel: Channel,
        count: int,
        process: int,
        *,
        settings: str,
        versions: str,
        start_timeout: float,
    ):
        self._count = count
        self._channel = channel
        self._lock = threading.Lock()
        self._calls = self._arrivals = 0
        self._stop_signal: int | None = None
        self._last_call: int | None = None
        self._forwarded = False
        self._told_last_call = threading.Event()
        self._all_left = threading.Event()
        channel.send(
            process=process,
            count=count,
            host=socket.gethostname(),
            pid=os.getpid(),
            settings=_for_a_message(settings),
            versions=versions,
        )
        self._wait_for_all(time.monotonic() + start_timeout)
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def stop_reached(self, stop_signal: int | None) -> int | None:
        """Called before each unit of work that all do together, in the same order.

        Args:
          stop_signal: the signal that this process got, or None.

        Returns:
          None to go on; or, if all are to stop here, the signal that some process got.
          All stop before the same unit.
        """
        if stop_signal is not None and not self._forwarded:
            self._forwarded = True
            self._channel.send(stop=stop_signal)
        with self._lock:
            is_to_stop = self._stop_signal is not None
            if not is_to_stop:
                self._calls += 1
        if is_to_stop:
            self._told_last_call.wait()
            if self._calls == self._last_call:
                return self._stop_signal
            self._calls += 1
        self.arrive()
        return None

    def arrive(self) -> None:
        """Called before each place where all wait for each other, in the same order."""
        self._arrivals += 1
        self._channel.send(arrivals=self._arrivals)

    def failed(self, text: str, *, at_once: bool = False) -> None:
        """Says that this process cannot go on; the others will end too.

        If another process is lost, whatever fails here fails because of that: then the
        supervisor, which knows better, ends this process in a moment.

        Args:
          text: the reason.
          at_once: whether not to wait for the supervisor.
        """
        self._channel.send(failing=True)
        if not at_once:
            self._all_left.wait(_GRACE_SECONDS)
        self._channel.send(failed=text[:MAX_TEXT])

    def close(self, timeout: float) -> None:
        """Leaves, and waits up to `timeout` seconds for all others to leave."""
        self._channel.send(left=True)
        self._all_left.wait(timeout)

    def _wait_for_all(self, deadline: float) -> None:
        missing = "some"
        while True:
            message = self._received(max(deadline - time.monotonic(), 0.0))
            if message is None:
                raise PeerError(
                    f"of {self._count} processes, these did not come within the start "
                    f"timeout: {missing}. See what they say; --process_id counts from "
                    "0, and all need the same --coordinator"
                )
            if "refused" in message:
                raise PeerError(message["refused"])
            if "missing" in message:
                missing = message["missing"]
                log.warning("waiting for process %s of %d", missing, self._count)
            if "go" in message:
                return

    def _listen(self) -> None:
        while not self._all_left.is_set():
            message = self._received(_BEAT_SECONDS) or {}
            # It shows the others that this process is not stuck.
            self._channel.send(beat=True)
            if "stop" in message:
                with self._lock:
                    is_new = self._stop_signal is None
                    if is_new:
                        self._stop_signal = message["stop"]
                if is_new:
                    self._channel.send(stops_at=self._calls)
            elif "last_call" in message:
                self._last_call = message["last_call"]
                self._told_last_call.set()
            elif "all_left" in message:
                self._all_left.set()

    def _received(self, timeout: float | None):
        try:
            return self._channel.receive(timeout)
        except ChannelClosedError:
            return _end_process()


def _for_a_message(settings: str) -> str:
    """The settings if they fit in a message, or else their digest."""
    if len(settings) <= MAX_TEXT:
        return settings
    return f"settings of digest {hashlib.sha256(settings.encode()).hexdigest()}"


def _end_process() -> NoReturn:
    # Without a supervisor nobody would end this process when a peer is lost.
    os._exit(LOST)

"""A process beside each process of a training, for what that process cannot do.

When a peer is gone, a training may wait for it in a collective that nothing
interrupts, or its runtime may end it by an abort that names nobody (jax 0.10.2). So a
command that is one of several is two processes: the training, and its parent, which
does nothing that could get stuck. The parent keeps the connection to process 0, whose
parent is the hub of all (`peer_hub`); it passes on messages and signals, and when
another process is lost, it ends the training and says why.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from meshwright.framework.compiler.xla.processes import ProcessGroup
from meshwright.trainers.processes.peer_channel import Channel, ChannelClosedError
from meshwright.trainers.processes.peer_hub import Hub
from meshwright.trainers.processes.peers import LOST, PeerError
from meshwright.trainers.startup.messages import printable
from meshwright.trainers.startup.process_flags import split_address

log = logging.getLogger("absl")

_TICK = 0.25
_GRACE_SECONDS = 5.0
_SAY_WAITING_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def start_supervised(
    group: ProcessGroup, *, start_timeout: float, timeout: float
) -> Channel:
    """Divides this process into a supervisor and a training, and returns in the latter.

    To be called before TensorFlow or JAX have started any thread.

    Args:
      group: the processes of the training, this one among them.
      start_timeout: seconds to wait for process 0.
      timeout: seconds after which a process that is silent, or keeps the others
        waiting, counts as lost.

    Returns:
      The channel to the supervisor.

    Raises:
      PeerError: this is process 0, and it cannot listen at the coordinator's address.
    """
    server = _listening(group.coordinator) if group.process == 0 else None
    above, below = socket.socketpair()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        above.close()
        if server is not None:
            server.close()
        _die_with(parent)
        os.setpgid(0, 0)  # Signals of a terminal come once, from the supervisor.
        return Channel(below)
    below.close()
    hub = None
    if server is not None:
        hub = Hub(server, group.count, timeout=timeout)
    supervisor = _Supervisor(group, child, Channel(above), timeout)
    return supervisor.run(time.monotonic() + start_timeout, hub)


class _Supervisor:
    """Watches over one training, and over the connection to process 0.

    Args:
      group: the processes of the training.
      child: the training's process id.
      below: the channel to the child.
      timeout: seconds of silence after which process 0 counts as lost.
    """

    def __init__(self, group: ProcessGroup, child: int, below: Channel, timeout: float):
        self._group = group
        self._child = child
        self._below = below
        self._timeout = timeout
        self._above: Channel | None = None
        self._is_failing = self._has_spoken = self._all_left = False
        self._status: int | None = None
        self._killed_by: signal.Signals | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda signum, frame: self._signal_child(signum))

    def run(self, deadline: float, hub: Hub | None) -> NoReturn:
        """Runs until the training has ended, then ends this process with its status."""
        lost = None
        try:
            if self._has_come(deadline):
                lost = self._relay()
        except PeerError as error:
            self._end_child()
            name = os.path.basename(sys.argv[0])
            text = printable(str(error))
            print(f"{name}: {text}", file=sys.stderr, flush=True)
            self._status = 1
        if lost is not None:
            self._end_child()
            print(f"\n{printable(lost)}", file=sys.stderr, flush=True)
            self._status = LOST
        if hub is not None:
            hub.join(_GRACE_SECONDS)
        # Python's work at exit is the training's to do.
        os._exit(self._status)

    def _has_come(self, deadline: float) -> bool:
        """Whether the training is ready for the others; if so, tells process 0.

        Raises:
          PeerError: process 0 does not answer.
        """
        hello = None
        while hello is None and not self._has_child_ended():
            try:
                hello = self._below.receive(_TICK)
            except ChannelClosedError:
                time.sleep(_TICK)  # It is about to end.
        if hello is None:
            return False
        self._above = self._connected(deadline)
        if self._above is None:
            return False
        self._above.send(**hello)
        return True

    def _connected(self, deadline: float) -> Channel | None:
        """A channel to process 0; None if the training ends before it can be had."""
        address, at = split_address(self._group.coordinator), self._group.coordinator
        logged = time.monotonic()
        while not self._has_child_ended():
            try:
                return Channel(socket.create_connection(address, timeout=5.0))
            except OSError as error:
                reason = error.strerror or str(error)
            now = time.monotonic()
            if now > deadline:
                raise PeerError(
                    f"process 0 did not answer at {at} ({reason}): start it, give all "
                    "its address as --coordinator, and open the port"
                )
            if now - logged > _SAY_WAITING_SECONDS:
                logged = now
                log.warning("waiting for process 0 at %s (%s)", at, reason)
            time.sleep(0.2)
        return None

    def _relay(self) -> str | None:
        """Relays messages until the training ends; returns the error that ended it, or
        None.
        """
        heard = time.monotonic()
        ended: float | None = None
        while True:
            channels = [c for c in (self._above, self._below) if c is not None]
            ready = select.select(channels, [], [], _TICK)[0]
            now = time.monotonic()
            if self._below in ready:
                self._pass_up()
            if self._above in ready:
                heard = now
                lost = self._pass_down()
                if lost is not None:
                    return lost
            is_heard = self._above is None or self._all_left or self._has_spoken
            if now - heard > self._timeout and not is_heard:
                return _lost(
                    "process 0, the coordinator, has not been heard of for "
                    f"{now - heard:.0f} s"
                )
            if ended is None and self._has_child_ended():
                ended = now
            if ended is not None and self._is_over(now - ended):
                return None

    def _is_over(self, since: float) -> bool:
        """Whether to stop relaying, `since` seconds after the training's end."""
        is_explained = self._has_spoken or self._all_left or self._above is None
        if self._status == 0 or is_explained:
            return True
        # It may have ended because a peer was lost: then a message will say so.
        if since < _GRACE_SECONDS:
            return False
        by = self._killed_by
        how = f"ended with status {self._status}" if by is None else f"got {by.name}"
        self._above.send(failed=f"it {how}", without_word=True)
        return True

    def _pass_up(self) -> None:
        try:
            for message in self._below.waiting():
                self._is_failing |= "failing" in message
                self._has_spoken |= "failed" in message
                if self._above is not None:
                    self._above.send(**message)
        except ChannelClosedError:
            self._below = None  # It ends.

    def _pass_down(self) -> str | None:
        """The error that is to end the training, or None."""
        try:
            for message in self._above.waiting():
                if "lost" in message and not self._has_spoken:
                    return _lost(message["lost"])
                # An error in all processes is for each to report; but an error after
                # another process has died is caused by that.
                is_cause = message.get("without_word") or not self._is_failing
                if "failed" in message and is_cause:
                    return (
                        f"a peer failed: {message['failed']}\nWhen that is mended, "
                        "start the same command again on all processes, to go on from "
                        "the newest checkpoint."
                    )
                self._has_spoken |= "refused" in message or "failed" in message
                self._all_left |= "all_left" in message
                if self._below is not None:
                    self._below.send(**message)
        except ChannelClosedError:
            self._above = None
            if not self._all_left and not self._has_spoken:
                return _lost("process 0, the coordinator, ended without a word")
        return None

    def _signal_child(self, signum: int) -> None:
        if self._status is None:
            os.kill(self._child, signum)

    def _has_child_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid != 0:
                self._take(status)
        return self._status is not None

    def _end_child(self) -> None:
        if not self._has_child_ended():
            os.kill(self._child, signal.SIGKILL)
            self._take(os.waitpid(self._child, 0)[1])

    def _take(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            self._killed_by = signal.Signals(-code)
        self._status = 128 - code if code < 0 else code  # As in shells.


def _lost(text: str) -> str:
    return (
        f"lost a peer: {text}. Start the same command again on all processes, to go on "
        "from the newest checkpoint."
    )


def _listening(address: str) -> socket.socket:
    _, port = split_address(address)
    try:
        if socket.has_dualstack_ipv6():
            everywhere = ("", port)
            return socket.create_server(
                everywhere, family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise PeerError(
            f"process 0 cannot listen at {address} ({error.strerror or error}): is "
            "there a process 0 already? If not, choose another port for --coordinator"
        ) from error


def _die_with(parent: int) -> None:
    """Ends this process when its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(LOST)

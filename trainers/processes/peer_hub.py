"""What process 0 does for all processes of a training: roll call, loss, stopping.

A thread of process 0, to which every process, process 0 included, keeps one connection.
It listens where JAX's coordination service will listen, and makes way when all have
come: so one address is all that a user gives.

JAX's service also notices that a process is gone, after a timeout, but then ends the
others by an abort that does not say which (measured with jax 0.10.2).
"""

from __future__ import annotations

import dataclasses
import itertools
import selectors
import socket
import threading
import time
from typing import Any

from meshwright.trainers.processes.peer_channel import Channel, ChannelClosedError

_TICK = 0.5
_HELLO_SECONDS = 30.0
_SAY_MISSING_SECONDS = 10.0
_BEAT_SECONDS = 1.0
_SHOWN = 8
_SHOWN_CHARACTERS = 100
_ALIKE = {
    "versions": "install the same on all machines",
    "settings": "give all the same gin files, parameters and flags",
}
"""What must be the same in all processes, and the remedy where it is not."""
_HELLO = {"process": int, "count": int, "host": str, "pid": int} | dict.fromkeys(
    _ALIKE, str
)


@dataclasses.dataclass(kw_only=True)
class _Member:
    """A process that has answered the roll call.

    Args:
      number: its process id.
      channel: the channel to it.
      host: the machine where it runs.
      pid: its process number there.
      heard: when its last message came; a training that is stuck sends none.
      arrivals: the number of places it has reached where all wait for each other.
      changed: when `arrivals` last grew.
      stops_at: the number of units of common work that it had begun when it heard that
        all are to stop, or None.
      left: whether it has ended its work.
    """

    number: int
    channel: Channel
    host: str
    pid: int
    heard: float
    arrivals: int = 0
    changed: float = 0.0
    stops_at: int | None = None
    left: bool = False


class Hub:
    """The watch over all processes, in a thread that starts at once.

    Args:
      server: a socket listening at the coordinator's address; closed once all have
        come.
      count: number of processes.
      timeout: seconds after which a process that is silent, or keeps the others
        waiting, is lost.
    """

    def __init__(self, server: socket.socket, count: int, *, timeout: float):
        self._server: socket.socket | None = server
        self._count = count
        self._timeout = timeout
        self._members: dict[int, _Member] = {}
        self._guests: dict[Channel, float] = {}  # Connected, not yet named.
        self._first_hello: dict[str, Any] = {}
        self._ended = False
        self._said_missing = self._beaten = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="peer hub", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Waits until all processes have left, or a process is lost."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._ended:
                for key, _ in self._selector.select(_TICK):
                    # An event of this batch may have closed the channel of a later
                    # event.
                    if key.fileobj is self._server:
                        self._accept()
                    elif key.fileobj.fileno() >= 0 and not self._ended:
                        self._read(key.fileobj)
                self._look_around()
        except Exception as error:
            self._lose(f"process 0's watch over all failed ({error!r})")
            raise
        finally:
            self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # The caller is gone, or there are too many.
            return
        channel = Channel(connection)
        self._guests[channel] = time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ)

    def _read(self, channel: Channel) -> None:
        member = next((m for m in self._members.values() if m.channel is channel), None)
        try:
            for message in channel.waiting():
                if member is None:
                    member = self._welcome(channel, message)
                else:
                    self._handle(member, message)
        except ChannelClosedError:
            self._drop(channel)
            if member is not None and not member.left and not self._ended:
                self._gone(member)

    def _drop(self, channel: Channel) -> None:
        self._guests.pop(channel, None)
        self._selector.unregister(channel)
        channel.close()

    def _welcome(self, channel: Channel, hello: dict[str, Any]) -> _Member:
        """Takes in a process that says hello, or refuses it.

        Raises:
          ChannelClosedError: the process was refused.
        """
        kinds = {key: type(value) for key, value in hello.items()}
        if kinds != _HELLO:
            raise ChannelClosedError("not a process of this training")
        refusal = self._refusal(hello)
        if refusal:
            channel.send(refused=refusal)
            raise ChannelClosedError(refusal)
        del self._guests[channel]
        now = time.monotonic()
        member = _Member(
            number=hello["process"],
            channel=channel,
            host=hello["host"],
            pid=hello["pid"],
            heard=now,
            changed=now,
        )
        self._members[member.number] = member
        self._first_hello = self._first_hello or hello
        if len(self._members) == self._count:
            # JAX's service needs the address.
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None
            for peer in self._members.values():
                peer.heard = peer.changed = now
            self._tell_all(go=True)
        else:
            channel.send(missing=self._missing())
        return member

    def _refusal(self, hello: dict[str, Any]) -> str:
        number, count = hello["process"], hello["count"]
        if count != self._count:
            return (
                f"process {number} was started with --num_processes={count}, another "
                f"process with {self._count}: give all the same"
            )
        if not 0 <= number < count:
            return f"there is no process {number} of {count}: they count from 0"
        taken = self._members.get(number)
        if taken is not None:
            return (
                f"there is a process {number} already, on {taken.host} (pid "
                f"{taken.pid}): give each its own --process_id, from 0 to {count - 1}"
            )
        for what, remedy in _ALIKE.items():
            value, first = hello[what], self._first_hello.get(what, hello[what])
            if value != first:
                return (
                    f"process {number} has other {what} than process "
                    f"{self._first_hello['process']} ({_difference(value, first)}): "
                    f"{remedy}"
                )
        return ""

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        member.heard = time.monotonic()
        arrivals = message.get("arrivals", member.arrivals)
        if arrivals != member.arrivals:
            member.arrivals, member.changed = arrivals, member.heard
        if "stop" in message:
            self._tell_all(stop=message["stop"])
        if "stops_at" in message:
            member.stops_at = message["stops_at"]
            stops = [peer.stops_at for peer in self._members.values()]
            if None not in stops:
                self._tell_all(last_call=max(stops))
        if "failed" in message:
            why = f"{self._named(member)} failed: {message['failed']}"
            self._end(failed=why, without_word=message.get("without_word", False))
        if "left" in message:
            member.left = True
            if all(peer.left for peer in self._members.values()):
                self._tell_all(all_left=True)
                self._ended = True

    def _look_around(self) -> None:
        now = time.monotonic()
        for channel, since in list(self._guests.items()):
            if now - since > _HELLO_SECONDS:
                self._drop(channel)
        if self._ended:
            return
        if now - self._beaten > _BEAT_SECONDS:
            self._beaten = now
            self._tell_all(beat=True)
        if self._server is not None:
            if now - self._said_missing > _SAY_MISSING_SECONDS:
                self._said_missing = now
                self._tell_all(missing=self._missing())
            return
        self._look_for_stuck(now)

    def _look_for_stuck(self, now: float) -> None:
        here = [member for member in self._members.values() if not member.left]
        most = max((member.arrivals for member in here), default=0)
        waiting = [member for member in here if member.arrivals == most]
        # All of them have waited since the last of them came.
        waited = now - max((member.changed for member in waiting), default=now)
        for member in here:
            silent = now - member.heard
            if silent > self._timeout:
                self._lose(
                    f"{self._named(member)} has not been heard of for {silent:.0f} s"
                )
            elif member.arrivals < most and waited > self._timeout:
                self._lose(
                    f"{self._named(member)} has kept the others waiting for "
                    f"{waited:.0f} s"
                )

    def _gone(self, member: _Member) -> None:
        if self._server is not None:
            # The training has not begun: the process may be started again.
            del self._members[member.number]
            if not self._members:
                self._first_hello = {}
            return
        self._lose(f"{self._named(member)} ended without a word")

    def _lose(self, text: str) -> None:
        self._end(lost=text)

    def _end(self, **message: Any) -> None:
        if not self._ended:
            self._ended = True
            self._tell_all(**message)

    def _named(self, member: _Member) -> str:
        return (
            f"process {member.number} of {self._count} ({member.host}, pid "
            f"{member.pid})"
        )

    def _missing(self) -> str:
        missing = [n for n in range(self._count) if n not in self._members]
        shown = ", ".join(map(str, missing[:_SHOWN]))
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return f"{shown}{more}"

    def _tell_all(self, **message: Any) -> None:
        for member in self._members.values():
            member.channel.send(**message)


def _difference(text: str, first: str) -> str:
    """The first pair of lines that differ in two texts."""
    pairs = itertools.zip_longest(text.splitlines(), first.splitlines(), fillvalue="")
    ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), (text, first))
    return f"{ours[:_SHOWN_CHARACTERS]!r}, not {theirs[:_SHOWN_CHARACTERS]!r}"

"""Messages between the processes of one training: JSON objects, one per line."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

_MAX_LINE = 64 * 1024
MAX_TEXT = 10_000
"""Characters of a text in a message; escaped, they fit in a line."""
_SEND_SECONDS = 5.0


class ChannelClosedError(ConnectionError):
    """The other side is gone, or sends what is no message."""


class Channel:
    """One side of a connection; any thread may send, one receives.

    Args:
      connection: a connected stream socket, which the channel owns.
    """

    def __init__(self, connection: socket.socket):
        # Messages are small and rare: if sending fails, the other side is stuck.
        connection.settimeout(_SEND_SECONDS)
        self._connection = connection
        self._received = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message; a failure shows in `receive`."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(line)

    def receive(self, timeout: float | None) -> dict[str, Any] | None:
        """The next message; None if none comes within `timeout` seconds.

        Args:
          timeout: None to wait for as long as it takes.

        Raises:
          ChannelClosedError: there will be no more messages.
        """
        while b"\n" not in self._received:
            try:
                if not select.select([self._connection], [], [], timeout)[0]:
                    return None
                data = self._connection.recv(_MAX_LINE)
            except (OSError, ValueError) as error:  # ValueError: closed by this side.
                raise ChannelClosedError(str(error)) from error
            if not data:
                raise ChannelClosedError("closed")
            self._received += data
            if b"\n" not in data and len(self._received) > _MAX_LINE:
                raise ChannelClosedError("no message")
        line, self._received = self._received.split(b"\n", 1)
        return _parsed(line)

    def waiting(self) -> Iterator[dict[str, Any]]:
        """The messages that have come, without waiting for more.

        Raises:
          ChannelClosedError: as `receive`, after those messages.
        """
        message = self.receive(0)
        while message is not None:
            yield message
            message = self.receive(0) if b"\n" in self._received else None

    def close(self) -> None:
        """Ends the connection; `receive`, waiting in any thread, then raises."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ChannelClosedError("no message")
    return message

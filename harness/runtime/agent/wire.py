"""Messages between processes: one JSON object a line, over a stream that may stall at any time."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

# Bounds the memory for a peer's line; a reason with a long traceback is shorter.
_LONGEST_BYTES = 1 << 20
_TCP_RTO_MAX_MS = 44  # linux/tcp.h; the socket module has no name for it yet

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The JSON object of a line; {} if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class Wire:
    """One connection; reading and writing never block."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a socket pair in a test has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Bounds TCP's doubling retry pauses, so that a link that was cut for seconds is used
            # again soon. Linux before 6.15 refuses.
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
        self._connection = connection
        self._received = b""
        self._unsent = b""
        self.is_closed = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message, *, is_urgent: bool = True) -> None:
        """Send without blocking; drops a message that is not urgent if others are unsent."""
        if self.is_closed:
            return
        if is_urgent or not self._unsent:
            self._unsent += encode(message)
        try:
            n_sent = self._connection.send(self._unsent, socket.MSG_NOSIGNAL)
            self._unsent = self._unsent[n_sent:]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """All messages that have arrived; if `is_closed`, there will be no more."""
        while not self.is_closed:
            try:
                data = self._connection.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            if not data or len(self._received) > _LONGEST_BYTES:
                self.close()
        *lines, self._received = self._received.split(b"\n")
        return [decode(line) for line in lines]

    def close(self) -> None:
        self.is_closed = True
        self._connection.close()

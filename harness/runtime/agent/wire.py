"""Messages between processes: one JSON object a line, over a stream that may stall at any time.

Messages from a rank's program to its agent; without an agent, nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from harness.inputs import find_int
from harness.runtime.agent import CHANNEL_VARIABLE

# Bounds the memory for a peer's line; a reason with a long traceback is shorter.
_LONGEST_BYTES = 1 << 20
_TCP_RTO_MAX_MS = 44  # linux/tcp.h; the socket module has no name for it yet

Message = dict[str, Any]


def decode(line: bytes) -> Message:
    """The JSON object of a line; {} if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class Wire:
    """One connection; reading and writing never block.

    Args:
        limit_s: the heartbeat's limit, before which TCP must not give up a silent peer, because a
            connection that ends means that the peer's agent has died.
    """

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a socket pair in a test has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            timeout_ms = min(2**31 - 1, int(2000 * limit_s))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
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
            self._unsent += json.dumps(message).encode() + b"\n"
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


# Keeps a message within one datagram.
_LONGEST_REASON = 10_000


class Channel:
    """The program's end of the connection to its agent."""

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection

    @classmethod
    def from_environment(cls) -> Channel:
        """Take over the agent's connection, so that child processes do not inherit it."""
        fd = find_int(os.environ.pop(CHANNEL_VARIABLE, ""), 0, 2**20)
        if fd is None:
            return cls(None)
        try:
            os.set_inheritable(fd, False)
            return cls(socket.socket(fileno=fd))
        except OSError:  # a variable of another launch: the agent has closed it
            return cls(None)

    @property
    def has_agent(self) -> bool:
        return self._connection is not None

    def _send(self, kind: str, fd: int | None = None, **values: Any) -> None:
        if self._connection is None:
            return
        data = json.dumps({"kind": kind, **values}).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._connection, [data], [] if fd is None else [fd])

    def join(self) -> None:
        """Report that this process initializes MPI, which no other can then do for this rank."""
        self._send("joins")

    def meet(
        self, connection: socket.socket, rank: int, hostnames: list[str], token: str, limit_s: float
    ) -> None:
        """Hand over a socket to the agents' network: on rank 0 the listener, else a connection."""
        self._send(
            "met", connection.fileno(), rank=rank, hostnames=hostnames, token=token, limit_s=limit_s
        )
        connection.close()

    def begin_run(self, name: str, directory: str, timeout_s: float, *, is_isolated: bool) -> None:
        """Announce a run; `directory` is empty on ranks that do not write its header."""
        self._send(
            "run", name=name, directory=directory, timeout_s=timeout_s, is_isolated=is_isolated
        )

    def end_part(self, name: str, fault: tuple[str, str] | None = None) -> None:
        """Report the end of this rank's part of a run; a fault (status, reason) ends the launch."""
        message = None if fault is None else [fault[0], fault[1][:_LONGEST_REASON]]
        self._send("part", name=name, fault=message)

    def end_run(self) -> None:
        """Report that every rank's part is over."""
        self._send("ended")

    def close_run(self) -> None:
        """Report that the run's header is final."""
        self._send("over")

    def fail(self, code: int, reason: str, *, is_secondary: bool = False) -> None:
        """Report that the program is about to end, and why, because mpi4py then ends all ranks.

        Args:
            is_secondary: the reason is a consequence of another rank's end.
        """
        reason = reason[:_LONGEST_REASON]
        self._send("failed", code=code, reason=reason, is_secondary=is_secondary)

    def leave(self) -> None:
        """Report that the launch is over, so that ranks may end."""
        self._send("left")

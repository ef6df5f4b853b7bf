"""Messages from a rank's program to its agent; without an agent, nothing is sent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from harness.runtime.agent import CHANNEL_VARIABLE

# Keeps a message within one datagram.
_LONGEST_REASON = 10_000


class Channel:
    """The program's end of the connection to its agent."""

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection

    @classmethod
    def from_environment(cls) -> Channel:
        """Take over the agent's connection, so that child processes do not inherit it."""
        fd = os.environ.pop(CHANNEL_VARIABLE, "")
        if not fd.isdigit():
            return cls(None)
        os.set_inheritable(int(fd), False)
        return cls(socket.socket(fileno=int(fd)))

    @property
    def has_agent(self) -> bool:
        return self._connection is not None

    def _send(self, kind: str, fd: int | None = None, **values: Any) -> None:
        if self._connection is None:
            return
        data = json.dumps({"kind": kind, **values}).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._connection, [data], [] if fd is None else [fd])

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

    def leave(self) -> None:
        """Report that the launch is over, so that ranks may end."""
        self._send("left")

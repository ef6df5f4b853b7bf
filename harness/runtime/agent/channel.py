"""Messages from a rank's program to its agent; none are sent where no agent has started it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from harness.runtime.agent import CHANNEL_VARIABLE

# A message goes in one piece.
_LONGEST_REASON = 10_000


class Channel:
    """The program's end."""

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection

    @classmethod
    def from_environment(cls) -> Channel:
        """The connection that the agent made, which the processes of runs do not inherit."""
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
        """The ranks have met: rank 0 hands over where it listens, the others their connection."""
        self._send(
            "met", connection.fileno(), rank=rank, hostnames=hostnames, token=token, limit_s=limit_s
        )
        connection.close()

    def begin_run(self, name: str, directory: str, timeout_s: float, *, is_isolated: bool) -> None:
        """A run begins; `directory` is empty on ranks that do not write its header."""
        self._send(
            "run", name=name, directory=directory, timeout_s=timeout_s, is_isolated=is_isolated
        )

    def end_part(self, name: str, fault: tuple[str, str] | None = None) -> None:
        """This rank's part of a run is over; a fault (status, reason) ends the launch."""
        message = None if fault is None else [fault[0], fault[1][:_LONGEST_REASON]]
        self._send("part", name=name, fault=message)

    def end_run(self) -> None:
        """Every rank's part is over."""
        self._send("ended")

    def close_run(self) -> None:
        """The header says how the run ended."""
        self._send("over")

    def leave(self) -> None:
        """The launch is over: ranks may end from now on."""
        self._send("left")

"""Exchange JSON lines with a Python program on a host, over the host's session."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from harness.nodes import processes, ssh

ENDED = "@harness:ended"
_GRACE_S = 2.0


class AgentError(Exception):
    """The program, its interpreter or its connection failed; the text is its last output line."""


class Agent:
    """The local end of the exchange.

    Attributes:
        has_ended: the program has ended, so the shell accepts another one.
    """

    def __init__(self, host: str, program: str, child: processes.Child, refusal: str = "") -> None:
        self.host = host
        self.program = program
        self.has_ended = False
        self._child = child
        self._refusal = refusal
        self._last_line = ""

    async def send(self, message: dict[str, object]) -> None:
        if not (self._refusal or self.has_ended):
            await self._child.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """The next message; the last other line of output is kept for the error.

        Raises:
            AgentError: the program ended, or was not started.
        """
        if self._refusal:
            raise AgentError(self._refusal)
        while not self.has_ended:
            line = await self._read_line()
            if line == ENDED:
                self.has_ended = True
            elif line.startswith("{"):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
            elif line.strip():
                self._last_line = line.strip()
        raise AgentError(self._last_line or "it ended without output")

    async def _read_line(self) -> str:
        try:
            return await self._child.read_line()
        except EOFError:
            await self._child.settle(1.0)
            self._last_line = ssh.last_line(self._child.errors) or "the connection ended"
            return ENDED

    async def finish(self) -> None:
        """Ask the program to end and wait for it, at most `_GRACE_S`."""
        if self.has_ended:
            return
        await self.send({})
        with contextlib.suppress(AgentError, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                while True:
                    await self.receive()

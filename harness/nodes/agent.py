"""A Python program on a host, spoken with by lines of JSON over its ssh connection."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from harness.nodes import processes, ssh
from harness.nodes.probe import remote_text


class AgentError(Exception):
    """The program, its interpreter or its connection failed; the text is its last word."""


class Agent:
    """One side of the conversation."""

    def __init__(self, host: str, child: processes.Child) -> None:
        self.host = host
        self._child = child

    async def send(self, message: dict[str, object]) -> None:
        await self._child.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """The next message; what a login shell prints before the first is skipped.

        Raises:
            AgentError: the program ended.
        """
        while True:
            try:
                line = await self._child.read_line()
            except EOFError:
                await self._child.settle(1.0)
                reason = ssh.last_line(self._child.errors) or "it ended without a word"
                raise AgentError(reason) from None
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))

    def finish(self) -> None:
        """Tell the program that nobody needs it any more."""
        self._child.close_stdin()


@contextlib.asynccontextmanager
async def start_agent(
    host: str, program: str, *, pythons: list[str], limit_s: int
) -> AsyncIterator[Agent]:
    """Start a program of remote/ on a host; it ends with the context, or by itself at its limit.

    Args:
        program: the file's name in remote/; its first argument is the limit in seconds.
        pythons: interpreters to try, in order.
    """
    remote = ssh.python_command(
        remote_text(f"remote/{program}"), [str(limit_s)], pythons=pythons, limit_s=limit_s
    )
    command = ssh.command(host, remote, connect_timeout_s=limit_s)
    async with processes.start(command) as child:
        yield Agent(host, child)

"""A shell on a host, and the programs that run over it: one login for all checks.

One login suffices because it is slower than most checks: it exchanges keys and reads the account's
startup files, which may start further programs.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from functools import cache
from importlib import resources
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


@cache
def remote_text(name: str) -> str:
    """The source of a program, by its path below harness/nodes."""
    return (resources.files("harness.nodes") / name).read_text()


READY = "@harness:ready"
_ESCAPE = re.compile("\x1b(?:\\[[0-?]{0,32}[ -/]{0,4}[@-~]|\\][^\x07]{0,256}\x07|[@-Z_])")


def plain(line: str) -> str:
    """A line without escape sequences (colours, terminal titles)."""
    return _ESCAPE.sub("", line).strip()


class Session:
    """The local end of the shell.

    Attributes:
        child: the ssh process.
        greeting: the last line that the login printed before its shell was ready.
    """

    def __init__(self, host: str, child: processes.Child) -> None:
        self.host = host
        self.child = child
        self.greeting = ""
        self._last: Agent | None = None

    async def wait_until_ready(self) -> None:
        """Skip the login's output; raises EOFError if the login ends first."""
        while (line := plain(await self.child.read_line())) != READY:
            self.greeting = line or self.greeting

    async def start(self, program: str, *, pythons: list[str], limit_s: int) -> Agent:
        """Start a program of remote/ in the shell, after the previous one has ended.

        Args:
            program: the file's name in remote/; its first argument is the limit in seconds.
            pythons: interpreters to try, in order.
        """
        last = self._last
        if last is not None:
            await last.finish()
        if last is not None and not last.has_ended:
            return Agent(self.host, program, self.child, f"{last.program} has not ended there")
        command = ssh.python_command(
            remote_text(f"remote/{program}"), [str(limit_s)], pythons=pythons, limit_s=limit_s
        )
        # One stream, so that an error message follows the earlier output.
        await self.child.write(f"{command} 2>&1; echo; echo {ENDED}\n".encode())
        self._last = Agent(self.host, program, self.child)
        return self._last


@contextlib.asynccontextmanager
async def open_session(
    host: str, *, connect_timeout_s: float, shared: str = ""
) -> AsyncIterator[Session]:
    """Start a login without waiting for it; the connection ends with the context.

    Args:
        shared: directory that offers the connection to mpirun's ssh; empty: not offered.
    """
    # The first echo ends an unfinished line of the login's output.
    remote = f"echo; echo {READY}; exec sh -s"
    command = ssh.command(host, remote, connect_timeout_s=connect_timeout_s, shared=shared)
    async with processes.start(command) as child:
        yield Session(host, child)

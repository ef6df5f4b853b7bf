"""A shell on a host: one login, in which the programs of a check run one after another.

Logging in costs more than most of what is then done: keys are exchanged, and the account's own
files are read, which may start programs of their own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator

from harness.nodes import processes, ssh
from harness.nodes.agent import ENDED, Agent
from harness.nodes.remote_text import remote_text

READY = "@harness:ready"
_ESCAPE = re.compile("\x1b(?:\\[[0-?]{0,32}[ -/]{0,4}[@-~]|\\][^\x07]{0,256}\x07|[@-Z_])")


def plain(line: str) -> str:
    """A line without what colours it or sets a terminal's title."""
    return _ESCAPE.sub("", line).strip()


class Session:
    """The head's end of the shell.

    Attributes:
        child: the ssh that holds it.
        greeting: the last line that the login printed before its shell was ready.
    """

    def __init__(self, host: str, child: processes.Child) -> None:
        self.host = host
        self.child = child
        self.greeting = ""
        self._last: Agent | None = None

    async def wait_until_ready(self) -> None:
        """Skip what the login prints; raises EOFError when there is none."""
        while (line := plain(await self.child.read_line())) != READY:
            self.greeting = line or self.greeting

    async def start(self, program: str, *, pythons: list[str], limit_s: int) -> Agent:
        """Start a program of remote/ in the shell, once the one before has ended.

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
        # What it says as it fails stands behind what it said before, in one stream.
        await self.child.write(f"{command} 2>&1; echo; echo {ENDED}\n".encode())
        self._last = Agent(self.host, program, self.child)
        return self._last


@contextlib.asynccontextmanager
async def open_session(
    host: str, *, connect_timeout_s: float, shared: str = ""
) -> AsyncIterator[Session]:
    """Log in, without waiting for the answer; the connection ends with the context.

    Args:
        shared: directory in which mpirun's ssh finds the connection; empty: it does not.
    """
    # What the login printed may lack the end of its line.
    remote = f"echo; echo {READY}; exec sh -s"
    command = ssh.command(host, remote, connect_timeout_s=connect_timeout_s, shared=shared)
    async with processes.start(command) as child:
        yield Session(host, child)

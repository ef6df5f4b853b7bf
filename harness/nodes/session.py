"""A shell on a host: one login, in which all programs of the checks run in sequence.

One login suffices because it is slower than most checks: it exchanges keys and reads the account's
startup files, which may start further programs.
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

"""ssh to hosts: options, meaning of its errors, and one login for all checks of a host.

A shell on the host runs the checks' programs. One login suffices because it is slower than most
checks: it exchanges keys and reads the account's startup files, which may start further programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shlex
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from harness.inputs import find_int
from harness.nodes import processes

READY, ENDED = "@harness:ready", "@harness:ended"
_GRACE_S = 2.0


class Login(StrEnum):
    """Outcome of a login attempt."""

    OK = "ok"
    UNKNOWN_KEY = "unknown_key"
    CHANGED_KEY = "changed_key"
    DENIED = "denied"
    KEY_FILE_OPEN = "key_file_open"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    UNRESOLVED = "unresolved"
    TIMED_OUT = "timed_out"
    CLOSED = "closed"
    NO_SHELL = "no_shell"
    LEFT = "left"
    WAITING = "waiting"
    FAILED = "failed"
    UNTRIED = "untried"


# sshd accepts no more logins for now: MaxStartups, a penalty, or the same on a jump host.
_NO_BANNER = "(kex|ssh)_exchange_identification|banner exchange"
_DROPPED = f"{_NO_BANNER}|Not allowed at this time|stdio forwarding failed|UNKNOWN port 65535"
# The first match applies: ssh also prints "Host key verification failed" for a changed key, and
# "Permission denied" for a key file that others may read.
# A server's banner comes before ssh's messages and may be long, and the patterns are not linear.
_LONGEST = 10_000
_MESSAGES = [
    (Login.CHANGED_KEY, "REMOTE HOST IDENTIFICATION HAS CHANGED"),
    (Login.CHANGED_KEY, "host key for .* has changed"),
    (Login.UNKNOWN_KEY, "host key is known for|Host key verification failed"),
    (Login.KEY_FILE_OPEN, "UNPROTECTED PRIVATE KEY FILE"),
    (Login.DENIED, "Permission denied|Too many authentication failures"),
    (Login.REFUSED, "Connection refused"),
    (Login.UNREACHABLE, "No route to host|Network is unreachable|Host is down"),
    (Login.UNRESOLVED, "Could not resolve hostname"),
    (Login.TIMED_OUT, "[Tt]imed out|Timeout, server"),
    (Login.CLOSED, f"Connection (closed|reset) by|{_DROPPED}"),
    (Login.NO_SHELL, "currently not available|nologin|command not found|No such file"),
]


@dataclass(frozen=True, kw_only=True)
class Target:
    """ssh's destination for a host, by its configuration files.

    Attributes:
        proxy: jump hosts or proxy command; empty: none.
    """

    hostname: str
    port: int
    user: str
    is_proxied: bool
    proxy: str = ""


def options(connect_timeout_s: float, *, shared: str = "", is_master: bool = False) -> list[str]:
    """Options: no questions, no trust in unknown keys, no reuse of a user's other connections.

    Args:
        shared: directory of this program's open connections, which save another key exchange;
            empty: none.
        is_master: open such a connection rather than use one.
    """
    return [
        "-T",
        "-x",
        "-oBatchMode=yes",
        "-oStrictHostKeyChecking=yes",
        f"-oConnectTimeout={max(1, math.ceil(connect_timeout_s))}",
        "-oConnectionAttempts=1",
        f"-oControlMaster={'yes' if shared and is_master else 'no'}",
        f"-oControlPath={f'{shared}/%C' if shared else 'none'}",
        "-oLogLevel=ERROR",
        # A user's configuration may start a program or forward ports.
        "-oRemoteCommand=none",
        "-oClearAllForwardings=yes",
    ]


def python_command(program: str, arguments: list[str], *, pythons: list[str], limit_s: int) -> str:
    """The command that runs a Python program on a host, with a time limit if it has `timeout`.

    The program is sent as hexadecimal digits, because quotes in csh protect neither line ends nor
    exclamation marks.

    Args:
        program: the source.
        pythons: interpreters, of which the first that exists is used.
    """
    unpack = "import sys; exec(compile(bytes.fromhex(sys.argv.pop(1)), sys.argv[0], 'exec'))"
    choose = (
        f'for p in {shlex.join(pythons)}; do command -v "$p" >/dev/null 2>&1 && break; done; '
        f'l="timeout {limit_s}"; $l true 2>/dev/null || l=; exec $l "$p" -c "$0" "$@"'
    )
    return shlex.join(["sh", "-c", choose, unpack, program.encode().hex(), *arguments])


async def target(host: str) -> Target | str:
    """Query ssh's destination for a host; returns the error message on failure."""
    done = await processes.run(["ssh", "-G", "-T", "--", host], timeout_s=5.0)
    if done.returncode != 0:
        return last_line(done.stderr) or "ssh -G failed"
    values = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    proxies = [values.get(key, "none").strip() for key in ("proxyjump", "proxycommand")]
    proxy = next((proxy for proxy in proxies if proxy not in ("none", "")), "")
    return Target(
        hostname=values.get("hostname", host),
        port=find_int(values.get("port", "22"), 1, 65535) or 22,
        user=values.get("user", ""),
        is_proxied=bool(proxy),
        proxy=proxy,
    )


async def hostnames(hosts: Sequence[str]) -> list[str]:
    """Where ssh's configuration reaches hosts: by the same name unless a host has another there."""
    targets = await asyncio.gather(*map(target, hosts))
    return [
        host if isinstance(found, str) else found.hostname
        for host, found in zip(hosts, targets, strict=True)
    ]


def explain(stderr: str) -> Login:
    """The outcome of a failed login, by ssh's messages."""
    stderr = stderr[-_LONGEST:]
    for login, pattern in _MESSAGES:
        if re.search(pattern, stderr):
            return login
    return Login.FAILED


def was_dropped(stderr: str) -> bool:
    """Whether sshd closed the connection before the login began, so that a retry may succeed."""
    return explain(stderr) is Login.CLOSED and bool(re.search(_DROPPED, stderr))


def cause(stderr: str) -> str:
    """The last line that tells the outcome, since a jump host's failure is followed by others."""
    login = explain(stderr)
    patterns = [pattern for of, pattern in _MESSAGES if of is login]
    lines = stderr[-_LONGEST:].splitlines()
    told = (line for line in reversed(lines) if any(re.search(p, line) for p in patterns))
    return next(told, last_line(stderr)).strip()


def outdated_key(stderr: str) -> str:
    """Arguments by which ssh-keygen removes the outdated host key; empty if ssh names none."""
    stderr = stderr[-_LONGEST:]
    name = re.search(r"[Hh]ost key for (\S+) has changed", stderr)
    file = re.search(r"Offending .*key in (.+):\d+", stderr)
    options = [("-R", name), ("-f", file)]
    return shlex.join(word for option, m in options if m for word in (option, m[1]))


def failed_jump(proxy: str, stderr: str) -> str:
    """The jump host whose own login failed, as arguments of ssh; empty: none, or one of several."""
    jump = re.fullmatch(r"([^\s,:]+)(?::([0-9]+))?", proxy)
    is_own = explain(stderr) in (Login.UNKNOWN_KEY, Login.CHANGED_KEY, Login.DENIED)
    if jump is None or not (is_own and re.search(_NO_BANNER, stderr[-_LONGEST:])):
        return ""
    return f"-p {jump[2]} {jump[1]}" if jump[2] else jump[1]


def last_line(text: str) -> str:
    """The last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


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
            self._last_line = last_line(self._child.errors) or "the connection ended"
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


# Escape sequences: colours, terminal titles.
_ESCAPE = re.compile("\x1b(?:\\[[0-?]{0,32}[ -/]{0,4}[@-~]|\\][^\x07]{0,256}\x07|[@-Z_])")


class Session:
    """The local end of the shell.

    Attributes:
        child: the ssh process.
        greeting: the last line that the login printed before its shell was ready.
        hostname: of ssh's configuration; where other hosts, which lack that file, connect to.
    """

    def __init__(self, host: str, child: processes.Child) -> None:
        self.host = host
        self.hostname = host
        self.child = child
        self.greeting = ""
        self._last: Agent | None = None

    async def wait_until_ready(self) -> None:
        """Skip the login's output; raises EOFError if the login ends first."""
        while (line := _ESCAPE.sub("", await self.child.read_line()).strip()) != READY:
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
        source = remote_text(f"remote/{program}")
        line = python_command(source, [str(limit_s)], pythons=pythons, limit_s=limit_s)
        # One stream, so that an error message follows the earlier output.
        await self.child.write(f"{line} 2>&1; echo; echo {ENDED}\n".encode())
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
    chosen = options(connect_timeout_s, shared=shared, is_master=True)
    async with processes.start(["ssh", *chosen, "--", host, remote]) as child:
        yield Session(host, child)

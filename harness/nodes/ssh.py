"""How hosts are reached by ssh: options, the target that ssh's configuration gives, its errors."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from enum import StrEnum

from harness.inputs import find_int
from harness.nodes import processes


class Login(StrEnum):
    """How an attempt to log in ended."""

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


# sshd takes no more logins for now: MaxStartups, a penalty, or the same at a jump host.
_DROPPED = (
    "(kex|ssh)_exchange_identification|banner exchange|Not allowed at this time|"
    "stdio forwarding failed|UNKNOWN port 65535"
)
# The first that matches counts: a changed key also says "Host key verification failed", and a
# key file that others may read ends in "Permission denied".
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
    """Where ssh goes for a host, by its configuration files.

    Attributes:
        proxy: the jump hosts, or the command, that it goes through; empty: none.
    """

    hostname: str
    port: int
    user: str
    is_proxied: bool
    proxy: str = ""


def options(connect_timeout_s: float, *, shared: str = "", is_master: bool = False) -> list[str]:
    """No question is ever asked, no key taken on trust, no connection of others reused.

    Args:
        shared: directory of the connections that this program itself has open, which spare another
            exchange of keys; empty: none.
        is_master: open one, instead of using it.
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
        # A configuration for people may start a program of its own, or listen at ports.
        "-oRemoteCommand=none",
        "-oClearAllForwardings=yes",
    ]


def command(host: str, remote: str, *, connect_timeout_s: float, shared: str = "") -> list[str]:
    """The argument list that runs `remote`, read by the login shell, on a host of a hostfile.

    Args:
        shared: directory in which others find the connection; empty: nobody does.
    """
    chosen = options(connect_timeout_s, shared=shared, is_master=True)
    return ["ssh", *chosen, "--", host, remote]


def python_command(program: str, arguments: list[str], *, pythons: list[str], limit_s: int) -> str:
    """What starts a Python program on a host, under a time limit where the host has `timeout`.

    The login shell may be of the csh family, where quotes do not protect a line's end or an
    exclamation mark, so that the program travels as hexadecimal digits.

    Args:
        program: the text.
        pythons: interpreters, the first that exists runs it.
    """
    unpack = "import sys; exec(compile(bytes.fromhex(sys.argv.pop(1)), sys.argv[0], 'exec'))"
    choose = (
        f'for p in {shlex.join(pythons)}; do command -v "$p" >/dev/null 2>&1 && break; done; '
        f'l="timeout {limit_s}"; $l true 2>/dev/null || l=; exec $l "$p" -c "$0" "$@"'
    )
    return shlex.join(["sh", "-c", choose, unpack, program.encode().hex(), *arguments])


async def target(host: str) -> Target | str:
    """Ask ssh itself where it would go; text on failure says why it cannot."""
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


def explain(stderr: str) -> Login:
    """What ssh's own messages say about a login that failed."""
    for login, pattern in _MESSAGES:
        if re.search(pattern, stderr):
            return login
    return Login.FAILED


def was_dropped(stderr: str) -> bool:
    """The connection was closed before the login began: it may be taken another time."""
    return explain(stderr) is Login.CLOSED and bool(re.search(_DROPPED, stderr))


def offending_file(stderr: str) -> str:
    """The file that holds the host key which no longer fits; empty when ssh names none."""
    match = re.search(r"Offending .*key in (.+):\d+", stderr)
    return match[1] if match else ""


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""

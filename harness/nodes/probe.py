"""Probe one host: resolve its name, connect to its port, log in, compare clocks, run probe.sh.

head                                   host
ssh HOST 'echo ready; exec sh -s'  --> logs in
                                   <-- ready
date                               --> three times: the clock's offset, and half the round
                                   <-- trip as its error
probe.sh                           --> runs under its own time limit
                                   <-- sections
"""

import asyncio
import contextlib
import math
import os
import random
import shlex
import socket
import threading
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from harness.domain.hostfile import Host
from harness.inputs import find_int
from harness.nodes import processes, ssh
from harness.nodes.ssh import Login, Session, open_session, remote_text

_END = "@harness:end"
_N_CLOCK_READINGS = 3
_CLOCK = "@harness:clock:"
# A kernel that is there answers at once, and three lost packets are sent again within 7 s.
_LONGEST_KNOCK_S = 10.0
# sshd drops logins beyond MaxStartups (10 at once by default), at random.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
# Each login through a jump host is a login on it too, so their number is limited.
N_THROUGH_PROXY = 8
Gates = defaultdict[str, asyncio.Semaphore]


def proxy_gates() -> Gates:
    """Semaphores that limit concurrent logins through each proxy."""
    return defaultdict(lambda: asyncio.Semaphore(N_THROUGH_PROXY))


@dataclass(frozen=True, kw_only=True)
class Order:
    """Parameters of the probe, equal for all hosts.

    Attributes:
        peers: names of all hosts, or those that ssh's configuration has for them.
        env_dir, repo_dir: paths that are the same on every host.
        timeout_s: time limit for one host, from the first packet to the last.
        deep: run a kernel on each GPU.
        hostfile: its path for remedies, quoted for a shell.
        shared: directory for the control sockets of the sessions; empty: none.
    """

    peers: tuple[str, ...]
    env_dir: str
    repo_dir: str
    timeout_s: float
    deep: bool = False
    hostfile: str = "HOSTFILE"
    shared: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbedClock:
    """A host's clock minus this machine's; the true offset lies within +- error_s."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Results of probing one host; after a failure, later fields stay empty.

    Attributes:
        host: its line of the hostfile.
        target: ssh's destination; None if ssh rejects the name.
        addresses: of the name.
        resolve_error, port_error: reason of the failure; empty on success.
        is_port_open: the port accepts connections (not tried through a proxy).
        banner: first line from the port, such as `SSH-2.0-OpenSSH_9.2`; empty if none came.
        login, login_detail: outcome of the login, and ssh's message; after a login, the message
            with which the shell ended before the probe did.
        outdated_key: arguments by which ssh-keygen removes a host key that has changed.
        failed_jump: the jump host whose login failed, as arguments of ssh.
        text: the probe's output, possibly truncated.
        is_complete: the probe ran to its end.
    """

    host: Host
    target: ssh.Target | None = None
    addresses: tuple[str, ...] = ()
    resolve_error: str = ""
    port_error: str = ""
    is_port_open: bool = False
    banner: str = ""
    login: Login = Login.UNTRIED
    login_detail: str = ""
    outdated_key: str = ""
    failed_jump: str = ""
    clock: ProbedClock | None = None
    text: str = ""
    is_complete: bool = False
    duration_s: float = 0.0

    @property
    def hostname(self) -> str:
        """Where other hosts, which lack this machine's ssh configuration, connect to."""
        return self.target.hostname if self.target is not None else self.host.name


def script(order: Order) -> str:
    """The text of probe.sh, preceded by its assignments, quoted for a POSIX shell."""
    command_s = max(1, round(order.timeout_s * 0.6))
    values = {
        "peers": " ".join(order.peers),
        "env_dir": order.env_dir,
        "repo_dir": order.repo_dir,
        "command_s": str(command_s),
        "total_s": str(round(order.timeout_s) + 1),
        "deep": "1" if order.deep else "0",
        "versions_py": remote_text("remote/versions.py"),
        "kernel_py": remote_text("remote/kernel.py"),
    }
    assignments = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    return assignments + remote_text("probe.sh")


async def probe(
    host: Host, order: Order, stack: AsyncExitStack, gates: Gates
) -> tuple[Probe, Session | None]:
    """Probe a host within its timeout; failures of the host do not raise.

    Args:
        gates: shared by all hosts that are probed together.

    Returns:
        The results, and the session if the probe is complete. The stack closes the session.
    """
    start_s = asyncio.get_running_loop().time()
    deadline_s = start_s + order.timeout_s
    found = await _reach(host, deadline_s)
    is_proxied = found.target is not None and found.target.is_proxied
    session = None
    if is_proxied or found.is_port_open:
        found, session = await _log_in(found, order, stack, deadline_s, gates)
    found = replace(found, duration_s=asyncio.get_running_loop().time() - start_s)
    return found, session if found.is_complete else None


async def _log_in(
    found: Probe, order: Order, stack: AsyncExitStack, deadline_s: float, gates: Gates
) -> tuple[Probe, Session]:
    """Log in and run the probe; retry after a pause if sshd dropped the connection early."""
    loop = asyncio.get_running_loop()
    proxy = found.target.proxy if found.target is not None else ""
    dropped: Probe | None = None
    for usual_pause_s in (*_PAUSES_S, math.inf):
        async with AsyncExitStack() as attempt:
            async with gates[proxy] if proxy else contextlib.nullcontext():
                left_s = deadline_s - loop.time()
                session = await attempt.enter_async_context(
                    open_session(
                        found.host.name, connect_timeout_s=order.timeout_s, shared=order.shared
                    )
                )
                session.hostname = found.hostname
                found = await _enter(session, found, order, deadline_s)
            # Random, so that the dropped logins do not retry at the same moment.
            pause_s = usual_pause_s * random.uniform(0.5, 1.5)
            is_last = loop.time() + pause_s > deadline_s
            is_dropped = found.login is Login.CLOSED and ssh.was_dropped(session.child.errors)
            began_late = left_s < order.timeout_s / 2
            if dropped is not None and began_late and found.login is Login.TIMED_OUT:
                found = dropped
            if not is_dropped or is_last:
                stack.push_async_exit(attempt.pop_all().__aexit__)
                is_in = found.login is Login.OK
                return await _ask(session, found, order, deadline_s) if is_in else found, session
            dropped = found
        await asyncio.sleep(pause_s)
    raise AssertionError("the last attempt returns")


async def _reach(host: Host, deadline_s: float) -> Probe:
    target = await ssh.target(host.name)
    if isinstance(target, str):
        return Probe(host=host, login=Login.FAILED, login_detail=target)
    found = Probe(host=host, target=target)
    # Behind a proxy the address is informative only, so it gets little time.
    loop = asyncio.get_running_loop()
    share = 0.2 if target.is_proxied else 1.0
    try:
        async with asyncio.timeout((deadline_s - loop.time()) * share):
            addresses = await _resolve(target.hostname, target.port)
    except TimeoutError:
        return replace(found, resolve_error="the name server does not answer")
    except OSError as error:
        return replace(found, resolve_error=error.strerror or str(error))
    found = replace(found, addresses=addresses)
    end_s = min(deadline_s, loop.time() + _LONGEST_KNOCK_S)
    return found if target.is_proxied else await _knock(found, target, end_s)


async def _resolve(name: str, port: int) -> tuple[str, ...]:
    """Resolve in a daemon thread, so that a name server that hangs does not delay the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[str, ...] | OSError] = loop.create_future()

    def settle(found: tuple[str, ...] | OSError) -> None:
        if not future.cancelled():
            future.set_result(found)

    def look_up() -> None:
        found: tuple[str, ...] | OSError
        try:
            entries = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except OSError as error:
            found = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=look_up, daemon=True).start()
    answer = await future
    if isinstance(answer, OSError):
        raise answer
    return answer


async def _knock(found: Probe, target: ssh.Target, deadline_s: float) -> Probe:
    """Connect to the first address that accepts, and read the server's banner."""
    loop = asyncio.get_running_loop()
    error = ""
    for n_tried, address in enumerate(found.addresses):
        share_s = (deadline_s - loop.time()) / (len(found.addresses) - n_tried)
        try:
            async with asyncio.timeout(share_s):
                reader, writer = await asyncio.open_connection(address, target.port)
        except TimeoutError:
            error = f"{address} port {target.port}: no answer in {share_s:.0f} s"
        except OSError as failure:
            reason = os.strerror(failure.errno) if failure.errno else str(failure)
            error = f"{address} port {target.port}: {reason}"
        else:
            banner = await _read_banner(reader, min(2.0, share_s / 4))
            writer.transport.abort()
            return replace(found, is_port_open=True, banner=banner)
    return replace(found, port_error=error)


async def _read_banner(reader: asyncio.StreamReader, timeout_s: float) -> str:
    """The first line from the server; the short limit leaves the login time if the server hangs."""
    try:
        async with asyncio.timeout(timeout_s):
            return (await reader.readline()).decode(errors="replace").strip()
    except (TimeoutError, OSError, ValueError):
        return ""


async def _enter(session: Session, found: Probe, order: Order, deadline_s: float) -> Probe:
    """Wait until the login has read its startup files and the session's shell is ready."""
    try:
        async with asyncio.timeout_at(deadline_s):
            await session.wait_until_ready()
    except TimeoutError:
        problem = Login.WAITING if session.greeting else Login.TIMED_OUT
        detail = session.greeting or f"no answer in {order.timeout_s:g} s"
    except EOFError:
        await session.child.settle(1.0)
        problem, detail = _explain_end(session)
    else:
        return replace(found, login=Login.OK, login_detail="")
    errors = session.child.errors
    proxy = found.target.proxy if found.target is not None else ""
    return replace(
        found,
        login=problem,
        login_detail=detail,
        outdated_key=ssh.outdated_key(errors),
        failed_jump=ssh.failed_jump(proxy, errors),
    )


async def _ask(session: Session, found: Probe, order: Order, deadline_s: float) -> Probe:
    child = session.child
    lines: list[str] = []
    clock: ProbedClock | None = None
    is_complete, ended = False, ""
    try:
        async with asyncio.timeout_at(deadline_s):
            clock = await _read_clock(child)
            await child.write(script(order).encode())
            while (line := await child.read_line()) != _END:
                lines.append(line)
            is_complete = True
    except TimeoutError:
        pass
    except EOFError:
        await child.settle(1.0)
        ended = ssh.last_line(child.errors) or f"status {child.returncode}"
    return replace(
        found, clock=clock, text="\n".join(lines), is_complete=is_complete, login_detail=ended
    )


def _explain_end(session: Session) -> tuple[Login, str]:
    """Why a login ended: by ssh's message, else the host's; ssh's own failures have status 255."""
    errors = session.child.errors
    problem, detail = ssh.explain(errors), ssh.cause(errors)
    if problem is Login.FAILED and session.child.returncode != 255:
        says = ssh.explain(session.greeting)
        problem = Login.LEFT if says is Login.FAILED else says
        detail = session.greeting or detail or f"status {session.child.returncode}"
    return problem, detail


async def _read_clock(child: processes.Child) -> ProbedClock | None:
    """Read the host's clock several times and keep the reading with the shortest round trip."""
    readings: list[ProbedClock] = []
    for _ in range(_N_CLOCK_READINGS):
        before_s = time.time()
        start_s = time.monotonic()
        await child.write(f"date +{_CLOCK}%s.%N || echo {_CLOCK}\n".encode())
        # Programs started by the login may print at any time.
        while not (line := await child.read_line()).startswith(_CLOCK):
            pass
        answer = line.removeprefix(_CLOCK)
        error_s = half_s = (time.monotonic() - start_s) / 2
        seconds, _, nanoseconds = answer.partition(".")
        whole = find_int(seconds)
        if whole is None:
            return None
        if find_int(nanoseconds) is not None:
            remote_s = float(answer)
        else:  # BusyBox gives whole seconds only
            remote_s, error_s = whole + 0.5, error_s + 0.5
        readings.append(ProbedClock(offset_s=remote_s - (before_s + half_s), error_s=error_s))
    return min(readings, key=lambda reading: reading.error_s)

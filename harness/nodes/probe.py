"""Look at one host from outside and from inside: name, port, login, clock, and the probe's text.

head                                   host
ssh HOST 'echo ready; exec sh -s'  --> logs in
                                   <-- ready
date                               --> three times: the clock's offset, and half the round
                                   <-- trip as its error
probe.sh                           --> runs under its own time limit
                                   <-- sections
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from harness.domain.hostfile import Host
from harness.nodes import processes, ssh
from harness.nodes.remote_text import remote_text
from harness.nodes.session import Session, open_session
from harness.nodes.ssh import Login

_END = "@harness:end"
_N_CLOCK_READINGS = 3


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to ask of every host.

    Attributes:
        peers: every host's name.
        env_dir, repo_dir: paths that are the same on every host.
        timeout_s: what one host may cost, from the first packet to the last.
        deep: run a kernel on each GPU.
        hostfile: its path, as remedies write it, quoted for a shell.
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
class Clock:
    """A host's clock minus this one's; the truth lies within +- error_s."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found about one host; later parts stay empty when earlier ones fail.

    Attributes:
        host: its line of the hostfile.
        target: where ssh goes; None when ssh itself cannot tell.
        addresses: what the name resolves to.
        resolve_error, port_error: why there is no address, no connection; empty when fine.
        is_port_open: the port takes connections (not tried through a proxy).
        banner: what the port answers, such as `SSH-2.0-OpenSSH_9.2`; empty when it is silent.
        login, login_detail: how the attempt to log in ended, and ssh's message.
        key_file: where a host key stands that the host no longer has.
        text: the probe's output, perhaps cut off.
        is_complete: the probe came to its end.
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
    key_file: str = ""
    clock: Clock | None = None
    text: str = ""
    is_complete: bool = False
    duration_s: float = 0.0


def script(order: Order) -> str:
    """The probe with its assignments: every value quoted for a POSIX shell."""
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


async def probe(host: Host, order: Order, stack: AsyncExitStack) -> tuple[Probe, Session | None]:
    """Look at a host; never raises for what the host does, never takes longer than its timeout.

    Returns:
        What was found, and the session, open as long as the stack, where the probe came to its end.
    """
    start_s = asyncio.get_running_loop().time()
    deadline_s = start_s + order.timeout_s
    found = await _reach(host, deadline_s)
    is_proxied = found.target is not None and found.target.is_proxied
    session = None
    if is_proxied or found.is_port_open:
        session = await stack.enter_async_context(
            open_session(host.name, connect_timeout_s=order.timeout_s, shared=order.shared)
        )
        found = await _ask(session, found, order, deadline_s)
    found = replace(found, duration_s=asyncio.get_running_loop().time() - start_s)
    return found, session if found.is_complete else None


async def _reach(host: Host, deadline_s: float) -> Probe:
    target = await ssh.target(host.name)
    if isinstance(target, str):
        return Probe(host=host, login=Login.FAILED, login_detail=target)
    found = Probe(host=host, target=target)
    try:
        async with asyncio.timeout_at(deadline_s):
            addresses = await _resolve(target.hostname, target.port)
    except TimeoutError:
        return replace(found, resolve_error="the name server does not answer")
    except OSError as error:
        return replace(found, resolve_error=error.strerror or str(error))
    found = replace(found, addresses=addresses)
    return found if target.is_proxied else await _knock(found, target, deadline_s)


async def _resolve(name: str, port: int) -> tuple[str, ...]:
    """Resolve in a daemon thread: a name server that hangs must not hold up the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[str, ...]] = loop.create_future()

    def settle(addresses: tuple[str, ...], error: OSError | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(addresses)

    def look_up() -> None:
        addresses: tuple[str, ...] = ()
        failure: OSError | None = None
        try:
            entries = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except OSError as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, addresses, failure)

    threading.Thread(target=look_up, daemon=True).start()
    return await future


async def _knock(found: Probe, target: ssh.Target, deadline_s: float) -> Probe:
    """Connect to the port of the first address that takes it, and read who answers."""
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
    """A live server says its name at once; one that hangs must leave the login its time."""
    try:
        async with asyncio.timeout(timeout_s):
            return (await reader.readline()).decode(errors="replace").strip()
    except (TimeoutError, OSError, ValueError):
        return ""


async def _ask(session: Session, found: Probe, order: Order, deadline_s: float) -> Probe:
    child = session.child
    lines: list[str] = []
    clock: Clock | None = None
    is_in = is_complete = False
    key_file = ""
    try:
        async with asyncio.timeout_at(deadline_s):
            await session.wait_until_ready()
            is_in = True
            clock = await _read_clock(child)
            await child.write(script(order).encode())
            while (line := await child.read_line()) != _END:
                lines.append(line)
            is_complete = True
    except TimeoutError:
        problem = Login.TIMED_OUT
        detail = f"no answer in {order.timeout_s:g} s"
    except EOFError:
        await child.settle(1.0)
        problem, detail = ssh.explain(child.errors), ssh.last_line(child.errors)
        key_file = ssh.offending_file(child.errors)
    found = replace(found, clock=clock, text="\n".join(lines), is_complete=is_complete)
    if is_in:
        return replace(found, login=Login.OK)
    return replace(found, login=problem, login_detail=detail, key_file=key_file)


async def _read_clock(child: processes.Child) -> Clock | None:
    """Ask the time a few times; the shortest round trip has the smallest error."""
    best: Clock | None = None
    for _ in range(_N_CLOCK_READINGS):
        before_s = time.time()
        start_s = time.monotonic()
        await child.write(b"date +%s.%N\n")
        answer = await child.read_line()
        error_s = half_s = (time.monotonic() - start_s) / 2
        seconds, _, nanoseconds = answer.partition(".")
        if not seconds.isdigit():
            return None
        if nanoseconds.isdigit():
            remote_s = float(answer)
        else:  # BusyBox knows whole seconds only
            remote_s, error_s = float(seconds) + 0.5, error_s + 0.5
        reading = Clock(offset_s=remote_s - (before_s + half_s), error_s=error_s)
        if best is None or reading.error_s < best.error_s:
            best = reading
    return best

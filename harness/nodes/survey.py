"""Probe all hosts in parallel, then run the checks between hosts.

    1. every host   name, port, login, clock, probe.sh     in parallel, at most timeout_s each
    2. all pairs    TCP                                    hosts that have answered so far
    3. all hosts    MPI hello, while torch is imported     the same hosts
    4. all hosts    all-reduce                             with hosts that have joined since
    5. all hosts    TCP and MPI again                      if any has joined

A host that hangs delays no other: the hosts that answered begin without it, and the all-reduce
waits at most half the timeout for more. A host that answers later is left out and named in the
report. Each host is logged into once, and all its checks use that session.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import harness
from harness.domain.hostfile import Host
from harness.errors import ConfigError, EnvironmentSetupError
from harness.nodes.between import (
    ALLREDUCE,
    MPI,
    TCP,
    Healthy,
    Pairs,
    Progress,
    Reduction,
    Talk,
    choose_run_interfaces,
)
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun
from harness.nodes.parse import parse_facts
from harness.nodes.probe import Order, Probe, probe, proxy_gates
from harness.nodes.ssh import Login, Session, hostnames
from harness.units import parse_duration

CHECKOUT = Path(harness.__file__).resolve().parents[1]
# Of the 104 bytes that the shortest system allows, ssh appends 58.
_MAX_SOCKET_DIRECTORY = 45
# Limit of concurrent ssh sessions.
_N_AT_ONCE = 128
# Hosts that share cores, such as virtual nodes, answer in sequence, mostly within this interval.
_QUIET_S = 1.0
# Longer, because a host that answers later is reported as left out.
_PATIENT_QUIET_S = 3.0


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """Results of one host: the probe's outcome and the parsed facts."""

    probe: Probe
    facts: Facts

    @property
    def name(self) -> str:
        return self.probe.host.name

    @property
    def is_in(self) -> bool:
        """Whether the login succeeded."""
        return self.probe.login is Login.OK


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Results of all hosts and of the checks between them; None: not run.

    Attributes:
        late: hosts that answered too late for the checks between hosts.
    """

    order: Order
    reports: tuple[HostReport, ...]
    late: tuple[str, ...] = ()
    pairs: Pairs | None = None
    hello: Hello | None = None
    reduction: Reduction | None = None
    has_mpirun: bool = True

    @property
    def answered(self) -> tuple[HostReport, ...]:
        return tuple(report for report in self.reports if report.is_in)


def environment() -> Path:
    """The virtual environment of this process, else that of the checkout."""
    return Path(sys.prefix) if sys.prefix != sys.base_prefix else CHECKOUT / ".venv"


def login_seconds(text: str, flag: str) -> float:
    """The seconds of a flag that limits or spaces logins.

    Raises:
        ConfigError: not a duration, or too short for one.
    """
    seconds = parse_duration(text)
    if seconds < 1:
        raise ConfigError(f"{flag} {text} is too short for an ssh login: give at least 1s")
    return seconds


def survey_hosts(
    hosts: Sequence[Host],
    *,
    hostfile: Path,
    timeout_s: float,
    env: Path | None = None,
    between: Collection[str] = (),
    launch_timeout_s: float = 0.0,
    deep: bool = False,
    progress: Progress = lambda _: None,
) -> Survey:
    """Probe all hosts and run the checks between them that are named.

    Args:
        hostfile: of the hosts, for remedies.
        env: the Python environment at the same path on every host; this process's if None.
        deep: run a kernel on each GPU.

    Raises:
        EnvironmentSetupError: this machine has no ssh client.
    """
    if shutil.which("ssh") is None:
        raise EnvironmentSetupError(
            "no ssh client on this machine: sudo apt-get install openssh-client"
        )
    with tempfile.TemporaryDirectory(prefix="check-") as sockets:
        order = Order(
            peers=tuple(host.name for host in hosts),
            env_dir=str((env or environment()).absolute()),
            repo_dir=str(CHECKOUT),
            timeout_s=timeout_s,
            deep=deep,
            hostfile=shlex.quote(str(hostfile)),
            shared=sockets if len(sockets) <= _MAX_SOCKET_DIRECTORY else "",
        )
        return asyncio.run(
            survey(
                hosts,
                order,
                between=frozenset({TCP, MPI, ALLREDUCE} & set(between)),
                launch_timeout_s=launch_timeout_s,
                progress=progress,
            )
        )


async def survey(
    hosts: Sequence[Host],
    order: Order,
    *,
    between: frozenset[str],
    launch_timeout_s: float,
    progress: Progress,
) -> Survey:
    """Probe all hosts; `between` names the checks between hosts to run: tcp, mpi, allreduce."""
    order = replace(order, peers=tuple(await hostnames(order.peers)))
    talk = Talk(order, between, launch_timeout_s, progress)
    async with _Inspection(hosts, order, progress) as inspection:
        await talk.begin(await inspection.first_healthy(order.timeout_s / 2))
        healthy = await inspection.all_healthy(order.timeout_s / 2)
        await talk.finish(healthy)
        reports = await inspection.reports()
    taken = {session.host for session, _ in healthy}
    known = {r.name: r.facts for r in reports if r.is_in}
    facts = choose_run_interfaces(known, order.repo_dir)
    return Survey(
        order=order,
        reports=tuple(replace(r, facts=facts.get(r.name, r.facts)) for r in reports),
        late=tuple(r.name for r in reports if r.is_in and r.name not in taken),
        pairs=talk.pairs,
        hello=talk.hello,
        reduction=talk.reduction,
        has_mpirun=find_mpirun(order.env_dir) is not None,
    )


class _Inspection:
    """Probes hosts in parallel and keeps the sessions of the healthy ones open."""

    def __init__(self, hosts: Sequence[Host], order: Order, progress: Progress) -> None:
        self._hosts = hosts
        self._order = order
        self._progress = progress
        self._gate = asyncio.Semaphore(_N_AT_ONCE)
        self._proxies = proxy_gates()
        self._sessions: dict[str, Session] = {}
        self._is_over = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._start_s = loop.time()
        self._reports: list[asyncio.Future[HostReport]] = [
            loop.create_future() for _ in self._hosts
        ]
        self._tasks = [
            asyncio.create_task(self._inspect(host, report))
            for host, report in zip(self._hosts, self._reports, strict=True)
        ]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over.set()
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _inspect(self, host: Host, report: asyncio.Future[HostReport]) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with self._gate:
                    found, session = await probe(host, self._order, stack, self._proxies)
                if session is not None:
                    self._sessions[host.name] = session
                report.set_result(HostReport(probe=found, facts=parse_facts(found.text)))
                n_settled = sum(one.done() for one in self._reports)
                self._progress(f"{n_settled} of {len(self._hosts)} hosts probed")
                if session is not None:
                    await self._is_over.wait()
        except Exception as error:
            if report.done():
                raise
            report.set_exception(error)

    async def first_healthy(self, patience_s: float) -> list[Healthy]:
        """Wait until a host is healthy and no more follow within a second."""
        end_s = asyncio.get_running_loop().time() + patience_s
        await self._wait_until_quiet(_QUIET_S, lambda now_s: bool(self._sessions) or now_s >= end_s)
        return self._healthy()

    async def all_healthy(self, patience_s: float) -> list[Healthy]:
        """Wait until all hosts are probed, or `patience_s` is over and no more follow."""
        end_s = self._start_s + patience_s
        await self._wait_until_quiet(_PATIENT_QUIET_S, lambda now_s: now_s >= end_s)
        return self._healthy()

    async def _wait_until_quiet(self, quiet_s: float, is_enough: Callable[[float], bool]) -> None:
        loop = asyncio.get_running_loop()
        while waiting := [one for one in self._reports if not one.done()]:
            done, _ = await asyncio.wait(
                waiting, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and is_enough(loop.time()):
                return

    def _healthy(self) -> list[Healthy]:
        """The healthy hosts so far, in the hostfile's order."""
        settled = [report.result() for report in self._reports if report.done()]
        return [(self._sessions[r.name], r.facts) for r in settled if r.name in self._sessions]

    async def reports(self) -> tuple[HostReport, ...]:
        """Wait until the last host has answered or timed out; returns all reports."""
        return tuple(await asyncio.gather(*self._reports))

"""Ask all hosts everything at once, and keep what each said.

    every host   name, port, login, clock, probe.sh        at most timeout_s each, all at once
    then         TCP between all pairs                     among the hosts that have answered
    then         MPI hello | all-reduce                    side by side

The second part starts when every host is settled, or after half the timeout once no more answer: a
host that hangs does not hold it up, and one that answers later is left out of it, by name. torch is
imported after the connections: where hosts share cores, as virtual ones do, that work would starve
them. A host is logged into once, for all that happens over ssh.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from harness.domain.hostfile import Host
from harness.nodes.allreduce import Reduction, run_allreduce
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun, run_hello
from harness.nodes.pairs import Pairs, connect_pairs
from harness.nodes.parse import parse_facts
from harness.nodes.probe import Order, Probe, probe
from harness.nodes.session import Session
from harness.nodes.ssh import Login

# Checks that talk between hosts; the rest look at one host.
TCP, MPI, ALLREDUCE = "tcp", "mpi", "allreduce"
# A host may hang at any moment: ssh sessions beyond this wait for their turn.
_N_AT_ONCE = 128
# Hosts that share cores, as virtual ones do, answer one after another, closer than this.
_QUIET_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """One host from outside (probe) and from inside (facts)."""

    probe: Probe
    facts: Facts

    @property
    def name(self) -> str:
        return self.probe.host.name

    @property
    def is_in(self) -> bool:
        """The login worked."""
        return self.probe.login is Login.OK


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Everything that was seen; None: not looked at.

    Attributes:
        late: hosts that answered only after the checks between hosts had begun.
        has_mpirun: this machine has an mpirun to start with.
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


Progress = Callable[[str], None]


async def survey(
    hosts: Sequence[Host],
    order: Order,
    *,
    between: frozenset[str],
    launch_timeout_s: float,
    progress: Progress,
) -> Survey:
    """Look at all hosts; `between` names the checks between hosts to run: tcp, mpi, allreduce."""
    async with _Inspection(hosts, order, progress) as inspection:
        early = await inspection.settle(order.timeout_s / 2)
        found = Survey(order=order, reports=())
        if early and between:
            found = await _look_between(found, early, between, launch_timeout_s, progress)
        reports = await inspection.reports()
    taken = {one.report.name for one in early}
    late = tuple(r.name for r in reports if r.is_in and r.name not in taken)
    return Survey(
        order=order,
        reports=reports,
        late=late,
        pairs=found.pairs,
        hello=found.hello,
        reduction=found.reduction,
        has_mpirun=find_mpirun(order.env_dir) is not None,
    )


@dataclass(frozen=True)
class _Healthy:
    """A host that has told all, and its open session."""

    report: HostReport
    session: Session

    @property
    def facts(self) -> Facts:
        return self.report.facts


class _Inspection:
    """Probes hosts, so many at once, and keeps the sessions of the healthy ones open meanwhile."""

    def __init__(self, hosts: Sequence[Host], order: Order, progress: Progress) -> None:
        self._hosts = hosts
        self._order = order
        self._progress = progress
        self._gate = asyncio.Semaphore(_N_AT_ONCE)
        self._sessions: dict[str, Session] = {}
        self._is_over = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
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
                    found, session = await probe(host, self._order, stack)
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

    async def settle(self, patience_s: float) -> list[_Healthy]:
        """Wait until every host is settled; after `patience_s` only while they keep settling.

        Returns:
            The healthy ones among them, in the hostfile's order.
        """
        await asyncio.wait(self._reports, timeout=patience_s)
        while waiting := [one for one in self._reports if not one.done()]:
            done, _ = await asyncio.wait(
                waiting, timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
        settled = [one.result() for one in self._reports if one.done()]
        return [
            _Healthy(report, self._sessions[report.name])
            for report in settled
            if report.name in self._sessions
        ]

    async def reports(self) -> tuple[HostReport, ...]:
        """All of them, once the last host has answered or used up its time."""
        return tuple(await asyncio.gather(*self._reports))


def has_package(facts: Facts, name: str) -> bool:
    """The environment that was asked for is there and holds the package."""
    return bool(facts.environment and facts.python and name in facts.python.packages)


async def _look_between(
    found: Survey,
    healthy: Sequence[_Healthy],
    between: frozenset[str],
    launch_timeout_s: float,
    progress: Progress,
) -> Survey:
    order = found.order
    python = f"{order.env_dir}/bin/python"
    facts = {one.report.name: one.facts for one in healthy}
    pairs = None
    if TCP in between and len(healthy) > 1:
        progress(f"TCP between {len(healthy)} hosts")
        pairs = await connect_pairs(
            [one.session for one in healthy],
            pythons=[python, "python3"],
            timeout_s=order.timeout_s / 2,
        )
    mpirun = find_mpirun(order.env_dir) if MPI in between else None
    with_mpi = {h: f for h, f in facts.items() if f.mpi and has_package(f, "mpi4py")}
    with_torch = [one.session for one in healthy if has_package(one.facts, "torch")]

    async def hello() -> Hello | None:
        if mpirun is None or not with_mpi:
            return None
        return await run_hello(mpirun, with_mpi, python=python, timeout_s=launch_timeout_s)

    async def reduction() -> Reduction | None:
        if ALLREDUCE not in between or not with_torch:
            return None
        limit_s = round(order.timeout_s + 3 * launch_timeout_s)
        agents = [
            await session.start("allreduce.py", pythons=[python], limit_s=limit_s)
            for session in with_torch
        ]
        return await run_allreduce(agents, facts, timeout_s=launch_timeout_s)

    if between & {MPI, ALLREDUCE}:
        progress(f"{' and '.join(sorted(between - {TCP}))} over {len(healthy)} hosts")
    said, reduced = await asyncio.gather(hello(), reduction())
    return Survey(order=order, reports=(), pairs=pairs, hello=said, reduction=reduced)

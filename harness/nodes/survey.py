"""Ask all hosts everything at once, and keep what each said.

    every host   name, port, login, clock, probe.sh        at most timeout_s each, all at once
                 torch is imported                         while others still hang
    then         TCP between all pairs                     among the hosts that have answered
    then         MPI hello | all-reduce                    side by side

The second part starts when every host is settled, or at half the timeout: a host that hangs does
not hold it up, and one that answers later is left out of it, by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from harness.domain.hostfile import Host
from harness.nodes.agent import Agent, start_agent
from harness.nodes.allreduce import Reduction, run_allreduce
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun, run_hello
from harness.nodes.pairs import Pairs, connect_pairs
from harness.nodes.parse import parse_facts
from harness.nodes.probe import Order, Probe, probe
from harness.nodes.ssh import Login

# Checks that talk between hosts; the rest look at one host.
TCP, MPI, ALLREDUCE = "tcp", "mpi", "allreduce"
# Importing torch costs the seconds that probing does not: where hosts share cores, as virtual ones
# do, it has to wait until no probe has ended for this long.
_QUIET_S = 1.0
# A host may hang at any moment: ssh sessions beyond this wait for their turn.
_N_AT_ONCE = 128


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
    async with AsyncExitStack() as stack:
        inspection = _Inspection(stack, order, ALLREDUCE in between, launch_timeout_s, progress)
        tasks = {host.name: asyncio.create_task(inspection.inspect(host)) for host in hosts}
        warm_up = asyncio.create_task(inspection.warm_up())
        settled, _ = await asyncio.wait(tasks.values(), timeout=order.timeout_s / 2)
        inspection.is_over = True
        await warm_up
        early = [task.result() for task in tasks.values() if task in settled]
        healthy = {r.name: r.facts for r in early if r.is_in and r.probe.is_complete}
        found = Survey(order=order, reports=())
        if healthy and between:
            found = await _look_between(
                found, healthy, inspection.agents, between, launch_timeout_s, progress
            )
        reports = tuple([await task for task in tasks.values()])
    late = tuple(r.name for r in reports if r.is_in and r.name not in healthy)
    return Survey(
        order=order,
        reports=reports,
        late=late,
        pairs=found.pairs,
        hello=found.hello,
        reduction=found.reduction,
        has_mpirun=find_mpirun(order.env_dir) is not None,
    )


class _Inspection:
    """Probes hosts and starts torch where the probe found it."""

    def __init__(
        self,
        stack: AsyncExitStack,
        order: Order,
        wants_torch: bool,
        launch_timeout_s: float,
        progress: Progress,
    ) -> None:
        self.agents: dict[str, Agent] = {}
        self._stack = stack
        self._order = order
        self._wants_torch = wants_torch
        self._limit_s = round(order.timeout_s + 3 * launch_timeout_s)
        self._progress = progress
        self._gate = asyncio.Semaphore(_N_AT_ONCE)
        self.is_over = False
        self._has_settled = asyncio.Event()
        self._waiting: list[str] = []
        self._n_settled = 0

    async def inspect(self, host: Host) -> HostReport:
        async with self._gate:
            found = await probe(host, self._order)
        report = HostReport(probe=found, facts=parse_facts(found.text))
        if self._wants_torch and has_package(report.facts, "torch") and found.is_complete:
            self._waiting.append(host.name)
        self._n_settled += 1
        self._has_settled.set()
        self._progress(f"{self._n_settled} of {len(self._order.peers)} hosts probed")
        return report

    async def warm_up(self) -> None:
        """Start torch on the hosts that have answered, whenever the others keep quiet."""
        while not self.is_over:
            try:
                await asyncio.wait_for(self._has_settled.wait(), _QUIET_S)
                self._has_settled.clear()
            except TimeoutError:
                await self._start_torch()
        await self._start_torch()

    async def _start_torch(self) -> None:
        python = f"{self._order.env_dir}/bin/python"
        while self._waiting:
            host = self._waiting.pop()
            self.agents[host] = await self._stack.enter_async_context(
                start_agent(host, "allreduce.py", pythons=[python], limit_s=self._limit_s)
            )


def has_package(facts: Facts, name: str) -> bool:
    """The environment that was asked for is there and holds the package."""
    return bool(facts.environment and facts.python and name in facts.python.packages)


async def _look_between(
    found: Survey,
    healthy: dict[str, Facts],
    agents: dict[str, Agent],
    between: frozenset[str],
    launch_timeout_s: float,
    progress: Progress,
) -> Survey:
    order = found.order
    python = f"{order.env_dir}/bin/python"
    pairs = None
    if TCP in between and len(healthy) > 1:
        progress(f"TCP between {len(healthy)} hosts")
        pairs = await connect_pairs(
            list(healthy), pythons=[python, "python3"], timeout_s=order.timeout_s / 2
        )
    mpirun = find_mpirun(order.env_dir) if MPI in between else None
    with_mpi = {h: f for h, f in healthy.items() if f.mpi and has_package(f, "mpi4py")}
    with_torch = [agents[host] for host in healthy if host in agents]

    async def hello() -> Hello | None:
        if mpirun is None or not with_mpi:
            return None
        return await run_hello(mpirun, with_mpi, python=python, timeout_s=launch_timeout_s)

    async def reduction() -> Reduction | None:
        if not with_torch:
            return None
        return await run_allreduce(with_torch, healthy, timeout_s=launch_timeout_s)

    if between & {MPI, ALLREDUCE}:
        progress(f"{' and '.join(sorted(between - {TCP}))} over {len(healthy)} hosts")
    said, reduced = await asyncio.gather(hello(), reduction())
    return Survey(order=order, reports=(), pairs=pairs, hello=said, reduction=reduced)

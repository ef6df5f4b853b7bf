"""Ask all hosts everything at once, and keep what each said.

    every host   name, port, login, clock, probe.sh        at most timeout_s each, all at once
    then         TCP between all pairs                     among the hosts that have answered
    then         MPI hello | all-reduce                    side by side

The second part starts when every host is settled, or at half the timeout: a host that hangs does
not hold it up, and one that answers later is left out of it, by name. torch is imported after the
connections: where hosts share cores, as virtual ones do, that work would starve them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from harness.domain.hostfile import Host
from harness.nodes.agent import start_agent
from harness.nodes.allreduce import Reduction, run_allreduce
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun, run_hello
from harness.nodes.pairs import Pairs, connect_pairs
from harness.nodes.parse import parse_facts
from harness.nodes.probe import Order, Probe, probe
from harness.nodes.ssh import Login

# Checks that talk between hosts; the rest look at one host.
TCP, MPI, ALLREDUCE = "tcp", "mpi", "allreduce"
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
        inspection = _Inspection(order, progress)
        tasks = {host.name: asyncio.create_task(inspection.inspect(host)) for host in hosts}
        settled, _ = await asyncio.wait(tasks.values(), timeout=order.timeout_s / 2)
        early = [task.result() for task in tasks.values() if task in settled]
        healthy = {r.name: r.facts for r in early if r.is_in and r.probe.is_complete}
        found = Survey(order=order, reports=())
        if healthy and between:
            found = await _look_between(found, healthy, stack, between, launch_timeout_s, progress)
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
    """Probes hosts, so many at once, and counts those that have settled."""

    def __init__(self, order: Order, progress: Progress) -> None:
        self._order = order
        self._progress = progress
        self._gate = asyncio.Semaphore(_N_AT_ONCE)
        self._n_settled = 0

    async def inspect(self, host: Host) -> HostReport:
        async with self._gate:
            found = await probe(host, self._order)
        self._n_settled += 1
        self._progress(f"{self._n_settled} of {len(self._order.peers)} hosts probed")
        return HostReport(probe=found, facts=parse_facts(found.text))


def has_package(facts: Facts, name: str) -> bool:
    """The environment that was asked for is there and holds the package."""
    return bool(facts.environment and facts.python and name in facts.python.packages)


async def _look_between(
    found: Survey,
    healthy: dict[str, Facts],
    stack: AsyncExitStack,
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
    with_torch = [h for h, f in healthy.items() if has_package(f, "torch")]

    async def hello() -> Hello | None:
        if mpirun is None or not with_mpi:
            return None
        return await run_hello(mpirun, with_mpi, python=python, timeout_s=launch_timeout_s)

    async def reduction() -> Reduction | None:
        if ALLREDUCE not in between or not with_torch:
            return None
        limit_s = round(order.timeout_s + 3 * launch_timeout_s)
        agents = [
            await stack.enter_async_context(
                start_agent(host, "allreduce.py", pythons=[python], limit_s=limit_s)
            )
            for host in with_torch
        ]
        return await run_allreduce(agents, healthy, timeout_s=launch_timeout_s)

    if between & {MPI, ALLREDUCE}:
        progress(f"{' and '.join(sorted(between - {TCP}))} over {len(healthy)} hosts")
    said, reduced = await asyncio.gather(hello(), reduction())
    return Survey(order=order, reports=(), pairs=pairs, hello=said, reduction=reduced)

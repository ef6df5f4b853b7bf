"""Ask all hosts everything at once, and keep what each said.

    every host   name, port, login, clock, probe.sh        at most timeout_s each, all at once
    then         TCP between all pairs                     among those that answer, once no more do
    then         MPI hello, torch's import meanwhile       among the same
    then         all-reduce                                with those that have joined
    then         TCP and MPI again                         if any has joined

A host that hangs holds nothing up: those that answered begin without it, and the all-reduce waits
at most half the timeout. Until then a host may join; one that answers later is left out, by name.
Each host is logged into once, for all that happens over ssh.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Self

from harness.domain.hostfile import Host
from harness.nodes.allreduce import Reduction
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun
from harness.nodes.pairs import Pairs
from harness.nodes.parse import parse_facts
from harness.nodes.probe import Order, Probe, probe, proxy_gates
from harness.nodes.run_interface import choose_run_interfaces
from harness.nodes.session import Session
from harness.nodes.ssh import Login
from harness.nodes.talk import Healthy, Progress, Talk

# A host may hang at any moment: ssh sessions beyond this wait for their turn.
_N_AT_ONCE = 128
# Hosts that share cores, as virtual ones do, answer one after another, mostly closer than this.
_QUIET_S = 1.0
# A host that is left out is reported.
_PATIENT_QUIET_S = 3.0


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


async def survey(
    hosts: Sequence[Host],
    order: Order,
    *,
    between: frozenset[str],
    launch_timeout_s: float,
    progress: Progress,
) -> Survey:
    """Look at all hosts; `between` names the checks between hosts to run: tcp, mpi, allreduce."""
    talk = Talk(order, between, launch_timeout_s, progress)
    async with _Inspection(hosts, order, progress) as inspection:
        await talk.begin(await inspection.first(order.timeout_s / 2))
        healthy = await inspection.settle(order.timeout_s / 2)
        await talk.carry_on(healthy)
        reports = await inspection.reports()
    taken = {session.host for session, _ in healthy}
    return Survey(
        order=order,
        reports=_as_in_a_run(reports),
        late=tuple(r.name for r in reports if r.is_in and r.name not in taken),
        pairs=talk.pairs,
        hello=talk.hello,
        reduction=talk.reduction,
        has_mpirun=find_mpirun(order.env_dir) is not None,
    )


def _as_in_a_run(reports: Sequence[HostReport]) -> tuple[HostReport, ...]:
    """With the interfaces of a run over those that answered."""
    answered = [report for report in reports if report.is_in]
    chosen = choose_run_interfaces([report.facts for report in answered])
    by_name = {r.name: replace(r, facts=f) for r, f in zip(answered, chosen, strict=True)}
    return tuple(by_name.get(report.name, report) for report in reports)


class _Inspection:
    """Probes hosts, so many at once, and keeps the sessions of the healthy ones open meanwhile."""

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

    async def first(self, patience_s: float) -> list[Healthy]:
        """The healthy ones as soon as there is one and no more follow it closely."""
        end_s = asyncio.get_running_loop().time() + patience_s
        await self._wait_until_quiet(_QUIET_S, lambda now_s: bool(self._sessions) or now_s >= end_s)
        return self._healthy()

    async def settle(self, patience_s: float) -> list[Healthy]:
        """The healthy ones once all are settled, or after `patience_s` when no more follow."""
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
        """In the hostfile's order."""
        settled = [one.result() for one in self._reports if one.done()]
        return [(self._sessions[r.name], r.facts) for r in settled if r.name in self._sessions]

    async def reports(self) -> tuple[HostReport, ...]:
        """All of them, once the last host has answered or used up its time."""
        return tuple(await asyncio.gather(*self._reports))

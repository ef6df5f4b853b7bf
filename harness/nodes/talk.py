"""What hosts do together: first those that answer soon, then with those that join them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from harness.nodes.agent import Agent
from harness.nodes.allreduce import Reduction, run_allreduce
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun, run_hello
from harness.nodes.pairs import Pairs, connect_pairs
from harness.nodes.probe import Order
from harness.nodes.session import Session

# Checks that talk between hosts; the rest look at one host.
TCP, MPI, ALLREDUCE = "tcp", "mpi", "allreduce"
Healthy = tuple[Session, Facts]
Progress = Callable[[str], None]


class Talk:
    """The checks between hosts, and what came of those that were asked for."""

    def __init__(
        self, order: Order, checks: frozenset[str], launch_timeout_s: float, progress: Progress
    ) -> None:
        self.pairs: Pairs | None = None
        self.hello: Hello | None = None
        self.reduction: Reduction | None = None
        self._order = order
        self._checks = checks
        self._launch_timeout_s = launch_timeout_s
        self._progress = progress
        self._python = f"{order.env_dir}/bin/python"
        self._met: set[str] = set()
        self._agents: dict[str, Agent] = {}

    async def begin(self, hosts: Sequence[Healthy]) -> None:
        """Connect these hosts, then let them import torch, without waiting for it."""
        await self._connect(hosts)
        await self._start_ranks(hosts)

    async def carry_on(self, hosts: Sequence[Healthy]) -> None:
        """Start jobs over all these hosts, then connect those that `begin` has not met."""
        await self._start_ranks(hosts)
        if self._checks & {MPI, ALLREDUCE}:
            names = " and ".join(sorted(self._checks - {TCP}))
            self._progress(f"{names} over {len(hosts)} hosts")
        facts = {session.host: facts for session, facts in hosts}
        self.hello, self.reduction = await asyncio.gather(self._hello(facts), self._reduce(facts))
        await self._connect(hosts)

    async def _connect(self, hosts: Sequence[Healthy]) -> None:
        sessions = [session for session, _ in hosts]
        new = {session.host for session in sessions} - self._met
        if TCP not in self._checks or len(sessions) < 2 or not new:
            return
        self._progress(f"TCP between {len(sessions)} hosts")
        found = await connect_pairs(
            sessions,
            new,
            pythons=[self._python, "python3"],
            timeout_s=self._order.timeout_s / 2,
        )
        self.pairs = found if self.pairs is None else self.pairs | found
        self._met |= new

    async def _start_ranks(self, hosts: Sequence[Healthy]) -> None:
        if ALLREDUCE not in self._checks:
            return
        limit_s = round(self._order.timeout_s + 3 * self._launch_timeout_s)
        agents = await asyncio.gather(
            *(
                session.start("allreduce.py", pythons=[self._python], limit_s=limit_s)
                for session, facts in hosts
                if session.host not in self._agents and facts.has_package("torch")
            )
        )
        self._agents |= {agent.host: agent for agent in agents}

    async def _hello(self, facts: dict[str, Facts]) -> Hello | None:
        mpirun = find_mpirun(self._order.env_dir) if MPI in self._checks else None
        able = {h: f for h, f in facts.items() if f.mpi and f.has_package("mpi4py")}
        if mpirun is None or not able:
            return None
        return await run_hello(mpirun, able, python=self._python, timeout_s=self._launch_timeout_s)

    async def _reduce(self, facts: dict[str, Facts]) -> Reduction | None:
        agents = [self._agents[host] for host in facts if host in self._agents]
        if not agents:
            return None
        return await run_allreduce(agents, facts, timeout_s=self._launch_timeout_s)

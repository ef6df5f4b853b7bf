"""The checks between hosts: first among the hosts that answer early, then with later ones.

Choose the interface that a run would use on each host, by the run's own rule.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.domain.interface import Interface, choose_interface
from harness.nodes.between import Pairs, Ready, Reduction, connect_pairs, get_ready, run_allreduce
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun, run_hello
from harness.nodes.probe import Order
from harness.nodes.session import Session


def choose_run_interfaces(hosts: Sequence[Facts]) -> list[Facts]:
    """Add to each host the interface and address that a run over all these hosts would use."""
    hostnames = [facts.hostname for facts in hosts]
    interfaces = [_addresses(facts) for facts in hosts]
    chosen = [choose_interface(rank, hostnames, interfaces) for rank in range(len(hosts))]
    return [
        replace(facts, run_interface=nic.name, run_address=nic.address)
        if nic and not nic.is_loopback
        else facts
        for facts, nic in zip(hosts, chosen, strict=True)
    ]


def _addresses(facts: Facts) -> list[Interface]:
    return [
        Interface(
            name=interface.name,
            address=str(network.ip),
            prefix_length=network.network.prefixlen,
            speed_bits_per_s=(interface.claimed_mbit_per_s or 0) * 1e6,
        )
        for interface in facts.interfaces
        if interface.is_up
        for network in map(ipaddress.ip_interface, interface.networks)
        if network.version == 4
    ]


# Checks between hosts; the others look at one host.
TCP, MPI, ALLREDUCE = "tcp", "mpi", "allreduce"
Healthy = tuple[Session, Facts]
Progress = Callable[[str], None]


def _with_run_interfaces(hosts: Sequence[Healthy]) -> list[Healthy]:
    chosen = choose_run_interfaces([facts for _, facts in hosts])
    return [(session, facts) for (session, _), facts in zip(hosts, chosen, strict=True)]


class Talk:
    """Runs the selected checks between hosts and holds their results."""

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
        self._connected: set[str] = set()
        self._starting: dict[str, asyncio.Task[Ready]] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def begin(self, hosts: Sequence[Healthy]) -> None:
        """Test TCP, then start importing torch in the background and run the MPI hello.

        Hosts that share cores, such as virtual nodes, import in turns. Otherwise the imports would
        delay some MPI ranks while the others spin for them, and connections would time out.
        """
        await self._connect(hosts)
        self._start_ranks(hosts)
        await self._say_hello(_with_run_interfaces(hosts))

    async def finish(self, hosts: Sequence[Healthy]) -> None:
        """Reduce over all these hosts; repeat TCP and MPI if some were not in `begin`."""
        self._start_ranks(hosts)
        await self._reduce(_with_run_interfaces(hosts))
        await self._connect(hosts)
        await self._say_hello(_with_run_interfaces(hosts))

    async def _connect(self, hosts: Sequence[Healthy]) -> None:
        sessions = [session for session, _ in hosts]
        new = {session.host for session in sessions} - self._connected
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
        self._connected |= new

    def _start_ranks(self, hosts: Sequence[Healthy]) -> None:
        if ALLREDUCE not in self._checks:
            return
        limit_s = round(self._order.timeout_s + 3 * self._launch_timeout_s)
        for session, facts in hosts:
            if session.host not in self._starting and facts.has_package("torch"):
                turn = self._turn_of(session.host, facts)
                self._starting[session.host] = asyncio.create_task(
                    get_ready(session, turn, python=self._python, limit_s=limit_s)
                )

    def _turn_of(self, host: str, facts: Facts) -> asyncio.Semaphore:
        """A semaphore per machine, which admits as many hosts at once as it has cores."""
        machine = facts.boot_id or host
        return self._turns.setdefault(machine, asyncio.Semaphore(facts.n_cores or 1))

    async def _say_hello(self, hosts: Sequence[Healthy]) -> None:
        """Run the hello over all hosts with MPI, unless it has already run over the same ones."""
        mpirun = find_mpirun(self._order.env_dir) if MPI in self._checks else None
        able = {s.host: f for s, f in hosts if f.mpi and f.has_package("mpi4py")}
        is_done = self.hello is not None and set(able) == set(self.hello.hosts)
        if mpirun is None or not able or is_done:
            return
        self._progress(f"MPI hello over {len(able)} hosts")
        self.hello = await run_hello(
            mpirun,
            able,
            python=self._python,
            timeout_s=self._launch_timeout_s,
            shared=self._order.shared,
        )

    async def _reduce(self, hosts: Sequence[Healthy]) -> None:
        facts = {session.host: facts for session, facts in hosts}
        starting = {host: self._starting[host] for host in facts if host in self._starting}
        if starting:
            self._progress(f"all-reduce over {len(starting)} hosts")
            self.reduction = await run_allreduce(starting, facts, timeout_s=self._launch_timeout_s)

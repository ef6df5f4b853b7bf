"""Tests between hosts over ssh: TCP connections of all pairs, and an all-reduce without MPI.

Each program listens on a free port and reports it. Then it connects to all others by their names
in the hostfile (or the HostName that ssh's configuration has for them), resolved on its host, and
verifies the identity of each. The test finds firewalls, names that a host resolves differently, and
addresses of other machines.

Each rank's program starts as soon as its host has answered, so that importing torch overlaps with
waiting for slower hosts; ranks are assigned once the set of hosts is known. Hosts that share a
machine import in turns, as many at once as it has cores, because more imports would starve the
other checks and take longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from harness.domain.interface import Interface, choose_interface
from harness.nodes.facts import Facts
from harness.nodes.mpi import Hello, find_mpirun, run_hello
from harness.nodes.probe import Order
from harness.nodes.ssh import Agent, AgentError, Session


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One ordered pair's outcome.

    Attributes:
        error: empty on success, else resolve, timeout, refused, impostor, or interface: only the
            address that runs take does not answer.
        detail: the address, or details of the error.
    """

    rtt_s: float | None = None
    error: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All outcomes.

    Attributes:
        connections: by (source, target).
        silent: hosts whose program did not start or report, with the reason.
    """

    connections: dict[tuple[str, str], Connection]
    silent: dict[str, str]

    def __or__(self, other: Pairs) -> Pairs:
        """The union of two sets of pairs that do not overlap."""
        return Pairs(
            connections=self.connections | other.connections, silent=self.silent | other.silent
        )


async def connect_pairs(
    sessions: Sequence[Session],
    new: Collection[str],
    addresses: Mapping[str, str],
    *,
    pythons: list[str],
    timeout_s: float,
) -> Pairs:
    """Test every ordered pair; a host that fails costs at most `timeout_s` per phase.

    Args:
        new: hosts of which each tested pair includes at least one.
        addresses: of hosts, which runs take; each must answer as the host's name does.
    """
    limit_s = round(3 * timeout_s)
    agents = await asyncio.gather(
        *(session.start("connect.py", pythons=pythons, limit_s=limit_s) for session in sessions)
    )
    ports, silent = await _gather_outputs(_messages(agents), timeout_s)
    listening = [agent for agent in agents if agent.host in ports]
    hostnames = {session.host: session.hostname for session in sessions}
    for agent in listening:
        peers = [
            [
                peer.host,
                hostnames[peer.host],
                ports[peer.host]["port"],
                addresses.get(peer.host, ""),
            ]
            for peer in listening
            if peer is not agent and (peer.host in new or agent.host in new)
        ]
        await agent.send({"name": agent.host, "timeout_s": timeout_s / 2, "peers": peers})
    results, fallen_silent = await _gather_outputs(_messages(listening), timeout_s)
    await asyncio.gather(*(agent.finish() for agent in agents))
    connections = {
        (source, str(name)): Connection(
            rtt_s=outcome.get("rtt_s"),
            error=str(outcome.get("error", "")),
            detail=str(outcome.get("detail", outcome.get("address", ""))),
        )
        for source, result in results.items()
        for name, outcome in result["peers"].items()
    }
    return Pairs(connections=connections, silent=silent | fallen_silent)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The outcome.

    Attributes:
        hosts: participants, in rank order.
        backend: nccl if torch can use a GPU on every host, else gloo.
        errors: by host; empty if every rank got the correct sum.
        left_out: hosts that could not import torch, with the reason.
        duration_s: the slowest rank's fastest repeat, 1 MiB.
    """

    hosts: tuple[str, ...]
    backend: str
    errors: dict[str, str]
    left_out: dict[str, str]
    duration_s: float | None = None


@dataclass(frozen=True)
class Ready:
    """A rank's program that has imported torch."""

    agent: Agent
    has_gpu: bool


async def get_ready(
    session: Session, turn: asyncio.Semaphore, *, python: str, limit_s: int
) -> Ready:
    """Wait for a turn, start a rank's program, and wait until it has imported torch.

    Raises:
        AgentError: the program failed before that.
    """
    async with turn:
        agent = await session.start("allreduce.py", pythons=[python], limit_s=limit_s)
        message = await agent.receive()
    return Ready(agent, bool(message.get("has_gpu")))


async def run_allreduce(
    starting: Mapping[str, Awaitable[Ready]], facts: Mapping[str, Facts], *, timeout_s: float
) -> Reduction:
    """Reduce over the hosts that import torch within `timeout_s`, which limits each later phase."""
    ready, left_out = await _gather_outputs(starting, timeout_s)
    ranks = [ready[host].agent for host in starting if host in ready]
    if not ranks:
        return Reduction(hosts=(), backend="", errors={}, left_out=left_out)
    backend = "nccl" if all(rank.has_gpu for rank in ready.values()) else "gloo"
    orders = rank_orders([agent.host for agent in ranks], facts, backend, timeout_s / 2)
    results, errors = await _reduce(ranks, orders, timeout_s)
    for host, message in results.items():
        if "error" in message:
            errors[host] = str(message["error"])
        elif not message.get("is_right"):
            errors[host] = "the sum is wrong"
    durations_s = [float(m["duration_s"]) for m in results.values() if "duration_s" in m]
    return Reduction(
        hosts=tuple(agent.host for agent in ranks),
        backend=backend,
        errors=errors,
        left_out=left_out,
        duration_s=max(durations_s, default=None),
    )


def rank_orders(
    hosts: Sequence[str], facts: Mapping[str, Facts], backend: str, timeout_s: float
) -> list[dict[str, object]]:
    """Arguments of each rank; port 0 stands for the one that rank 0 will choose."""
    is_single = len(hosts) == 1
    address = "127.0.0.1" if is_single else facts[hosts[0]].cluster_address or hosts[0]
    interfaces = [None if is_single else facts[host].cluster_interface for host in hosts]
    return [
        {
            "rank": rank,
            "size": len(hosts),
            "backend": backend,
            "interface": interface.name if interface else "",
            "address": address,
            "port": 0,
            "timeout_s": timeout_s,
        }
        for rank, interface in enumerate(interfaces)
    ]


async def _reduce(
    ranks: Sequence[Agent], orders: Sequence[dict[str, object]], timeout_s: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    await ranks[0].send(orders[0])
    ports, errors = await _gather_outputs(_messages(ranks[:1]), timeout_s)
    port = ports.get(ranks[0].host, {}).get("port")
    if port is None:
        message = ports.get(ranks[0].host, {}).get("error", "")
        return {}, errors or {ranks[0].host: str(message)}
    for agent, order in zip(ranks[1:], orders[1:], strict=True):
        await agent.send({**order, "port": port})
    return await _gather_outputs(_messages(ranks), timeout_s)


def _messages(agents: Sequence[Agent]) -> dict[str, Awaitable[dict[str, Any]]]:
    return {agent.host: agent.receive() for agent in agents}


async def _gather_outputs(
    waiting: Mapping[str, Awaitable[T]], timeout_s: float
) -> tuple[dict[str, T], dict[str, str]]:
    """Wait for all hosts; returns the answers and the errors, each by host."""
    found: dict[str, T] = {}
    errors: dict[str, str] = {}

    async def wait(host: str, answer: Awaitable[T]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                found[host] = await answer
        except TimeoutError:
            errors[host] = f"no answer in {timeout_s:g} s"
        except AgentError as error:
            errors[host] = str(error)

    await asyncio.gather(*(wait(host, answer) for host, answer in waiting.items()))
    return found, errors


def choose_run_interfaces(hosts: Mapping[str, Facts], repo_dir: str) -> dict[str, Facts]:
    """Add to each host the interface and address that a run over all these hosts would use."""
    hostnames = [facts.hostname for facts in hosts.values()]
    interfaces = [_addresses(facts) for facts in hosts.values()]
    found = dict(hosts)
    for rank, (host, facts) in enumerate(hosts.items()):
        wanted = requested_interface(Path(repo_dir) / "hosts", facts.hostname)
        nic = choose_interface(rank, hostnames, interfaces, wanted)
        if nic and not nic.is_loopback:
            found[host] = replace(facts, run_interface=nic.name, run_address=nic.address)
    return found


def requested_interface(directory: Path, hostname: str) -> str:
    """The interface that the settings of runs name for a host, or empty; as entry.sh reads them."""
    for name in (hostname, "cluster"):
        with contextlib.suppress(OSError, ValueError):
            text = (directory / f"{name}.env").read_text()
            if set_there := re.search(r"^GLOO_SOCKET_IFNAME=(\S+)", text, re.MULTILINE):
                return set_there[1]
    return ""


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
        await self._say_hello(self._facts(hosts))

    async def finish(self, hosts: Sequence[Healthy]) -> None:
        """Reduce over all these hosts; repeat TCP and MPI if some were not in `begin`."""
        self._start_ranks(hosts)
        await self._reduce(self._facts(hosts))
        await self._connect(hosts)
        await self._say_hello(self._facts(hosts))

    def _facts(self, hosts: Sequence[Healthy]) -> dict[str, Facts]:
        known = {session.host: facts for session, facts in hosts}
        return choose_run_interfaces(known, self._order.repo_dir)

    async def _connect(self, hosts: Sequence[Healthy]) -> None:
        sessions = [session for session, _ in hosts]
        new = {session.host for session in sessions} - self._connected
        if TCP not in self._checks or len(sessions) < 2 or not new:
            return
        self._progress(f"TCP between {len(sessions)} hosts")
        found = await connect_pairs(
            sessions,
            new,
            {host: facts.run_address for host, facts in self._facts(hosts).items()},
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
                machine, n_cores = facts.boot_id or session.host, facts.n_cores or 1
                turn = self._turns.setdefault(machine, asyncio.Semaphore(n_cores))
                starting = asyncio.create_task(
                    get_ready(session, turn, python=self._python, limit_s=limit_s)
                )
                # Read here too, because asyncio reports an error that Ctrl-C leaves unread.
                starting.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._starting[session.host] = starting

    async def _say_hello(self, facts: Mapping[str, Facts]) -> None:
        """Run the hello over all hosts with MPI, unless it has already run over the same ones."""
        mpirun = find_mpirun(self._order.env_dir) if MPI in self._checks else None
        able = {host: f for host, f in facts.items() if f.mpi and f.has_package("mpi4py")}
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

    async def _reduce(self, facts: Mapping[str, Facts]) -> None:
        starting = {host: self._starting[host] for host in facts if host in self._starting}
        if starting:
            self._progress(f"all-reduce over {len(starting)} hosts")
            self.reduction = await run_allreduce(starting, facts, timeout_s=self._launch_timeout_s)

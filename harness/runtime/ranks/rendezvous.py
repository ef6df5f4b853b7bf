"""Connect the ranks: a store on rank 0 at a free port, then host facts, NIC, device, backend."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from harness.domain.torch_builds import torch_problem
from harness.errors import LaunchError, first_line
from harness.inputs import parse_int
from harness.runtime.agent.wire import Channel
from harness.runtime.ranks.control import Control
from harness.runtime.ranks.environment import Launch, read_address, read_port
from harness.runtime.ranks.host import Gpu, HostFacts, describe_host
from harness.runtime.ranks.interfaces import list_interfaces
from harness.runtime.ranks.introduction import (
    HEARTBEAT_TIMEOUT_S,
    Endpoint,
    connect_agents,
    find_interface,
    introduce,
)
from harness.runtime.ranks.world import World
from harness.units import format_number

_log = logging.getLogger(__name__)
_STORE_TIMEOUT = timedelta(seconds=300)
_UNREACHABLE_S, _ANSWER_S = 60.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The result of the rendezvous on one rank.

    Attributes:
        channel: connection to this rank's agent.
        address, port: address of rank 0's store.
        facts: every rank's host, by rank.
    """

    world: World
    control: Control
    channel: Channel
    address: str
    port: int
    facts: list[HostFacts]

    def leave(self) -> None:
        """End the launch; all ranks must call it."""
        self.channel.leave()
        self.control.leave()


def _store(address: str, port: int = 0, *, is_master: bool = False) -> Any:
    """Start a store on this host, at a free port by default, or connect to one."""
    return TCPStore(
        address, port, is_master=is_master, wait_for_workers=False, timeout=_STORE_TIMEOUT
    )


def _connect_over_mpi(comm: Any, facts: HostFacts) -> tuple[Any, str, int]:
    """Start rank 0's store and broadcast its address by MPI."""
    gathered = comm.allgather(msgspec.json.encode(facts))
    all_facts = [msgspec.json.decode(data, type=HostFacts) for data in gathered]
    hosts = [f.hostname for f in all_facts], [f.interfaces for f in all_facts]
    mine = find_interface(0, *hosts, all_facts[0].requested_interface)
    store = _store(mine.address, is_master=True) if comm.rank == 0 else None
    endpoint = f"{mine.address} {store.port}" if store else ""
    address, port = comm.bcast(endpoint, root=0).split()
    return store or _store(address, int(port)), address, int(port)


def _connect_at_master(launch: Launch, environ: Mapping[str, str]) -> tuple[Any, str, int]:
    """Connect to the store at MASTER_ADDR, which torchrun's agent or rank 0 serves."""
    address, port = read_address(environ), read_port(environ)
    has_agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = launch.rank == 0 and not has_agent_store
    try:
        socket.getaddrinfo(address, port)  # TCPStore would retry until its timeout
    except OSError as error:
        raise LaunchError(
            f"MASTER_ADDR is {address}, which {socket.gethostname()} cannot resolve "
            f"({error.strerror}): set it to rank 0's host, or add that to /etc/hosts"
        ) from None
    if not is_server:
        _await_answer(launch.rank, address, port, _STORE_TIMEOUT.total_seconds())
    try:
        # By loopback, because rank 0 would look for a wrong MASTER_ADDR until the timeout.
        store = _store("127.0.0.1" if is_server else address, port, is_master=is_server)
    except RuntimeError as error:
        action = "serve" if is_server else "reach"
        raise LaunchError(
            f"rank {launch.rank} cannot {action} the store at MASTER_ADDR {address}, MASTER_PORT "
            f"{port} ({first_line(error)[:160]}): set both to rank 0's host and a free port there"
        ) from None
    if is_server:
        _await_answer(launch.rank, address, port, _UNREACHABLE_S)
    if has_agent_store:
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"harness/{attempt}", store), address, port
    return store, address, port


def _await_answer(rank: int, address: str, port: int, refused_s: float) -> None:
    """Wait until the store at MASTER_ADDR accepts a connection; TCPStore would try for 10 minutes.

    Args:
        refused_s: limit while the port refuses, as it does until rank 0 has started; a host that
            does not answer at all is given up earlier.
    """
    begin_s = time.monotonic()
    limit_s = _UNREACHABLE_S
    while True:
        try:
            socket.create_connection((address, port), timeout=_ANSWER_S).close()
            return
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                limit_s = refused_s
            reason = error.strerror or str(error)
        if time.monotonic() > begin_s + limit_s:
            break
        time.sleep(0.2)
    remedy = "this host" if rank == 0 else "rank 0's host, where rank 0 must run"
    raise LaunchError(
        f"rank {rank} on {socket.gethostname()} cannot reach MASTER_ADDR {address}, MASTER_PORT "
        f"{port} from {_source(address, port)} for {limit_s:g} s ({reason}): set MASTER_ADDR to an "
        f"address of {remedy}, or open the port in its firewall"
    )


def _source(address: str, port: int) -> str:
    """The interface by which this host sends to an address, and its own address there."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
        names = [interface.name for interface in list_interfaces() if interface.address == own]
        return " ".join([*names[:1], own])
    return "no interface"


def slurm_master(environ: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT unless the user sets them: the step's first node, on which rank 0
    runs, and a port that differs between jobs and their steps.

    SLURM_LAUNCH_NODE_IPADDR is no such address: srun may have been started on a login node.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or _first_node(nodes)
    if not address:
        raise LaunchError("srun set no SLURM_STEP_NODELIST: export MASTER_ADDR=<first node>")
    job, step = (
        parse_int(
            environ.get(name, "0"), name, error=LaunchError,
            remedy="start the ranks with srun, or unset it",
        )
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )  # fmt: skip
    # Below the ports that Linux gives to connections.
    port = environ.get("MASTER_PORT") or str(20000 + (16 * job + step) % 12000)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def _first_node(nodes: str) -> str:
    """The first host of a list such as `gpu[03-05,9]-a,login`: gpu03-a."""
    hosts = re.match(r"(\[[^]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", hosts[0]) if hosts else ""


def _driven_gpus(facts: list[HostFacts], hostnames: list[str]) -> list[Gpu | None]:
    """Each rank's GPU; the ranks of a host take the visible ones in turn."""
    n_before: Counter[str] = Counter()
    found: list[Gpu | None] = []
    for hostname, fact in zip(hostnames, facts, strict=True):
        gpus = fact.gpus
        found.append(gpus[n_before[hostname] % len(gpus)] if gpus else None)
        n_before[hostname] += 1
    return found


def _choose_backend(facts: list[HostFacts], driven: list[Gpu | None]) -> tuple[str, str]:
    """The backend and the reason: nccl if every rank has its own GPU, else gloo."""
    n_sharing = Counter(gpu.board for gpu in driven if gpu is not None)
    for rank, (fact, gpu) in enumerate(zip(facts, driven, strict=True)):
        if gpu is None:
            return "gloo", f"rank {rank} on {fact.hostname} has no GPU"
        if not fact.has_nccl:
            return "gloo", f"the torch of rank {rank} on {fact.hostname} has no NCCL"
        if n_sharing[gpu.board] > 1:
            return "gloo", (
                f"{n_sharing[gpu.board]} ranks share a GPU ({gpu.name}) on {fact.hostname}, and "
                "NCCL takes one rank a GPU"
            )
    return "nccl", "every rank has a GPU of its own"


def _check_versions(facts: list[HostFacts]) -> None:
    if problem := torch_problem(facts[0].versions.get("torch", "")):
        _log.warning("%s: run bash setup/install.sh", problem)
    first, *others = (
        {"the harness' code": fact.code or "older", **fact.versions} for fact in facts
    )
    for fact, other in zip(facts[1:], others, strict=True):
        for name, version in first.items():
            if other.get(name) != version:
                _log.warning(
                    "%s is %s on %s and %s on %s: numbers may not compare; run setup/sync_env.sh",
                    name, version, facts[0].hostname, other.get(name), fact.hostname,
                )  # fmt: skip
                return
    _log.debug("versions agree on %d ranks", len(facts))


def _share_of_cores(mine: HostFacts, on_host: list[HostFacts]) -> float:
    """This rank's part of its host: ranks that are bound have cores of their own, others share."""
    n_ranks = Counter(core for fact in on_host for core in fact.cores)
    share = sum(Fraction(1, n_ranks[core]) for core in mine.cores)
    return min(float(share), (mine.quota_cores or math.inf) / len(on_host))


def _build_world(launch: Launch, facts: list[HostFacts], comm: Any) -> World:
    hostnames = [fact.hostname for fact in facts]
    mine = facts[launch.rank]
    local_size = hostnames.count(mine.hostname)
    interface = find_interface(
        launch.rank, hostnames, [f.interfaces for f in facts], mine.requested_interface
    )
    driven = _driven_gpus(facts, hostnames)
    backend, reason = _choose_backend(facts, driven)
    gpu = driven[launch.rank]
    n_cores = _share_of_cores(mine, [f for f in facts if f.hostname == mine.hostname])
    # By UUID, because CUDA indices may differ between ranks.
    n_sharing = sum(each is not None and each.uuid == gpu.uuid for each in driven) if gpu else 1
    return World(
        rank=launch.rank,
        size=launch.size,
        hostname=mine.hostname,
        hostnames=hostnames,
        device=torch.device("cuda", mine.gpus.index(gpu)) if gpu else torch.device("cpu"),
        # Different shares of the same CPU are different kinds of device.
        device_kind=gpu.name if gpu else f"{mine.cpu} x {format_number(n_cores, 2)}",
        backend=backend,
        backend_reason=reason,
        interface=interface.name,
        nic_bytes_per_s=0.0 if interface.is_loopback else interface.speed_bits_per_s / 8,
        n_cores=n_cores,
        n_threads=max(1, int(n_cores)),
        memory_bytes=gpu.memory_bytes // n_sharing if gpu else mine.memory_bytes // local_size,
        n_sharing=n_sharing,
        mpi=comm,
    )


def meet(
    launch: Launch,
    environ: Mapping[str, str],
    *,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    channel: Channel | None = None,
    comm: Any = None,
) -> Meeting:
    """Connect to the other ranks, without a process group; all ranks must call it.

    Args:
        heartbeat_timeout_s: the agents end the launch if a rank is silent for this time.
        channel: to this rank's agent; None to take it from the environment.
        comm: of `introduce`, which is called without one.

    Raises:
        LaunchError: the ranks cannot connect.
    """
    channel = channel or Channel.from_environment()
    if comm is None:
        comm = introduce(launch, environ, channel, heartbeat_timeout_s)
    requested = environ.get("GLOO_SOCKET_IFNAME", "")
    facts = msgspec.structs.replace(describe_host(), requested_interface=requested)
    if comm is not None:
        store, address, port = _connect_over_mpi(comm, facts)
    elif launch.launcher == "none":
        store = _store("127.0.0.1", is_master=True)
        address, port = "127.0.0.1", store.port
    else:
        variables = slurm_master(environ) if launch.launcher == "slurm" else environ
        store, address, port = _connect_at_master(launch, variables)
    control = Control(store, launch.rank, launch.size)
    control.await_all(_STORE_TIMEOUT.total_seconds())
    all_facts = control.gather("facts", facts, HostFacts)
    world = _build_world(launch, all_facts, comm)
    if launch.size > 1 and comm is None:
        connect_agents(
            channel, launch.rank, world.hostnames, [fact.interfaces for fact in all_facts],
            all_facts[0].requested_interface, heartbeat_timeout_s,
            lambda endpoint: control.broadcast("agent", endpoint, Endpoint),
        )  # fmt: skip
    if launch.rank == 0:
        _check_versions(all_facts)
    return Meeting(
        world=world, control=control, channel=channel, address=address, port=port, facts=all_facts
    )


def join_process_group(world: World, address: str, port: int, name: str, timeout_s: float) -> None:
    """Start torch's process group with the store prefix `name`; all ranks of the run must call it.

    Uses the NIC that reaches the other ranks unless the environment names another.
    """
    # Set here, not in `meet`, because a run's process inherits the fork server's environment.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", world.interface)
    # "=" asks NCCL for an exact match; a bare name is a prefix.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={world.interface}")
    if world.device.type == "cuda":  # under gloo too, for events and streams
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        world.backend,
        store=PrefixStore(name, _store(address, port)),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )
    if world.backend == "nccl":  # without device_ids, NCCL guesses the device from the rank
        dist.barrier(device_ids=[world.device.index])

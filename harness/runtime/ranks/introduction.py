"""Connect the agents over MPI; rank 0's agent then hears of a rank that ends, and writes the row.

A rank's agent runs this module as a program if the rank's own died before it could; so it imports
no torch, the usual cause: `python -m harness.runtime.ranks.introduction FLAGS...`
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from harness.domain.interface import Interface, choose_interface, find_namesakes
from harness.errors import LaunchError, first_line
from harness.inputs import find_number
from harness.runtime.agent import CHECK
from harness.runtime.agent.ended import flags_in
from harness.runtime.agent.wire import Channel
from harness.runtime.ranks.environment import Launch, read_launch
from harness.runtime.ranks.interfaces import list_interfaces

# Defaults of flags, of which the shorter bounds the agents' heartbeats.
RUN_TIMEOUT_S, HEARTBEAT_TIMEOUT_S = 3600.0, 30.0
_PATIENCE_S = 60.0
_log = logging.getLogger(__name__)

Endpoint = tuple[str, int, str]
"""Address, port and token of rank 0's agent."""


def read_limit_s(words: Sequence[str]) -> float:
    """The heartbeats' limit by a command line's flags, whose values are checked later."""
    given = flags_in(words)
    defaults = {"run_timeout_s": RUN_TIMEOUT_S, "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S}
    return min(find_number(given.get(name, "")) or least for name, least in defaults.items())


def introduce(
    launch: Launch, environ: Mapping[str, str], channel: Channel, limit_s: float
) -> Any | None:
    """Connect the agents where ranks have MPI; all ranks must call it, before `meet`.

    Returns:
        COMM_WORLD; None without MPI.

    Raises:
        LaunchError: MPI cannot be used, or a rank cannot reach rank 0.
    """
    if not launch.has_mpi:
        return None
    channel.join()
    with _told_where_mpi_waits(launch.rank):
        comm = _mpi_world(launch)
        if launch.size == 1:
            return comm
        mine = (platform.node(), list_interfaces(), environ.get("GLOO_SOCKET_IFNAME", ""))
        try:
            gathered = comm.allgather(msgspec.json.encode(mine))
        except RuntimeError as error:  # the base of mpi4py's, which is first imported here
            name = "OMPI_MCA_btl_tcp_if_include"
            remedy = f"correct {name}={environ[name]}" if name in environ else CHECK
            raise LaunchError(
                f"rank {launch.rank} on {mine[0]} cannot reach the other ranks by MPI "
                f"({first_line(error)}): see the message of MPI, and {remedy}"
            ) from None
    kind = tuple[str, list[Interface], str]
    hosts = (msgspec.json.decode(data, type=kind) for data in gathered)
    names, interfaces, requested = map(list, zip(*hosts, strict=True))
    connect_agents(
        channel, launch.rank, names, interfaces, requested[0], limit_s,
        lambda endpoint: comm.bcast(endpoint, root=0),
    )  # fmt: skip
    return comm


def connect_agents(
    channel: Channel,
    rank: int,
    hostnames: list[str],
    interfaces: list[list[Interface]],
    requested: str,
    limit_s: float,
    broadcast: Callable[[Endpoint], Endpoint],
) -> None:
    """Connect the agents: rank 0's gets a listening socket, the others' a connection to it.

    Args:
        requested: the interface that the user names on rank 0's host, or empty.
        broadcast: gives rank 0's endpoint to all ranks.

    Raises:
        LaunchError: two hosts have one name, no interface reaches the other hosts, or this rank
            cannot reach rank 0.
    """
    if (namesakes := find_namesakes(hostnames, interfaces)) is not None:
        first, second, text = namesakes
        raise LaunchError(
            f"ranks {first} and {second} are on two hosts that are both named {text}: give each a "
            "name of its own (hostnamectl set-hostname NAME), because ranks of one host share it"
        )
    found = find_interface(0, hostnames, interfaces, requested)
    endpoint, listener = ("", 0, ""), None
    if rank == 0:
        listener = socket.create_server((found.address, 0), backlog=len(hostnames))
        endpoint = (found.address, listener.getsockname()[1], secrets.token_hex(16))
    address, port, token = broadcast(endpoint)
    if not channel.has_agent:
        return
    try:
        connection = listener or socket.create_connection((address, port), timeout=limit_s)
    except OSError as error:
        raise LaunchError(
            f"{hostnames[rank]} cannot reach {hostnames[0]} at {address} port {port} "
            f"({error}): look for a firewall between the hosts"
        ) from None
    channel.meet(connection, rank, hostnames, token, limit_s)


def find_interface(
    rank: int, hostnames: list[str], interfaces: list[list[Interface]], requested: str
) -> Interface:
    """`choose_interface`; raises LaunchError where it finds none."""
    found = choose_interface(rank, hostnames, interfaces, requested)
    if found is None:
        remedy = "unset GLOO_SOCKET_IFNAME, or set it" if requested else "set GLOO_SOCKET_IFNAME"
        names = ", ".join(f"{i.name} {i.address}" for i in interfaces[rank]) or "none"
        raise LaunchError(
            f"{hostnames[rank]} has no interface {requested and requested + ' '}that reaches the "
            f"other hosts (IPv4: {names}): {remedy} to the right one"
        )
    return found


@contextmanager
def _told_where_mpi_waits(rank: int) -> Iterator[None]:
    """Warn on rank 0 if it takes long: over an interface that leads nowhere MPI waits for ever."""
    text = "MPI has not connected all ranks within %.0f s; if it does not soon, stop and %s"
    timer = threading.Timer(_PATIENCE_S, _log.warning, (text, _PATIENCE_S, CHECK))
    timer.daemon = True
    if rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _mpi_world(launch: Launch) -> Any:
    """COMM_WORLD, checked against the launcher, because a foreign MPI makes every rank 0 of 1."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{launch.launcher} started this rank, but mpi4py cannot be used ({error}): "
            "run setup/install.sh, and start with the mpirun of the same environment"
        ) from None
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (launch.rank, launch.size):
        library = MPI.Get_library_version().split(",")[0].strip("\0 ")
        raise LaunchError(
            f"{launch.launcher} says rank {launch.rank} of {launch.size}, mpi4py ({library}) says "
            f"{comm.rank} of {comm.size}: mpirun and mpi4py belong to different MPIs; use the "
            "mpirun of the environment that setup/install.sh made"
        )
    return comm


if __name__ == "__main__":
    introduce(
        read_launch(os.environ), os.environ, Channel.from_environment(), read_limit_s(sys.argv[1:])
    )
    signal.pause()  # until the agent kills it: an end would abort the other ranks too early

"""Compare send/recv bandwidth and all-reduce bus bandwidth with iperf3 on the same link.

Start it like a workload; ranks 0 and 1 measure the link between them, all ranks the all-reduce:

    mpirun -np 5 --hostfile hosts/virtual.txt .venv/bin/python benchmarks/links_vs_iperf.py

iperf3 and the messages alternate in one run, with no other traffic on the link. Rates are goodput
in one direction: the receiver's by iperf3, and n_bytes over the median one-way time of messages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist
import tyro
from comparison import compare, joined, machine, show

from harness.errors import EnvironmentSetupError
from harness.measure.derive.links import bus_factor
from harness.runtime.devices.sampling import Budget, clock_for
from harness.runtime.ranks.gather import maximum_over_ranks
from harness.runtime.ranks.interfaces import list_interfaces
from harness.runtime.ranks.rendezvous import Meeting
from harness.runtime.ranks.world import World
from harness.units import format_bandwidth, parse_bytes
from harness.workloads.links.operations import (
    MpiTransport,
    TorchTransport,
    Transport,
    make_trial,
    time_trial,
)
from harness.workloads.links.pairs import time_pair

_START_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Options:
    pairs: int = 8
    """How often each is measured."""
    seconds: float = 2.0
    """Duration of each iperf3 measurement, and approximately of the messages of each turn."""
    size: str = "16MiB"
    """Size of the messages and of the all-reduce."""
    iperf_port: int = 5201
    """Free port on the second host."""
    json: bool = False
    """Print one JSON object per line."""


@contextmanager
def iperf_server(port: int) -> Iterator[None]:
    """Run an iperf3 server on this host until the context closes.

    Raises:
        EnvironmentSetupError: iperf3 is missing, or cannot listen.
    """
    program = shutil.which("iperf3")
    if program is None:
        raise EnvironmentSetupError("iperf3 is not installed on this host: apt-get install iperf3")
    server = subprocess.Popen(
        [program, "--server", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(_START_S)
        if server.poll() is not None:
            raise EnvironmentSetupError(f"iperf3 cannot listen on port {port}: give another one")
        yield
    finally:
        server.terminate()
        server.wait()


def iperf_bytes_per_s(address: str, port: int, seconds: float) -> float:
    """The receiver's rate by iperf3.

    Raises:
        EnvironmentSetupError: iperf3 failed; has its message.
    """
    command = ["iperf3", "--client", address, "--port", str(port), "--time", str(round(seconds))]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    if "error" in report:
        raise EnvironmentSetupError(f"{' '.join(command)}: {report['error']}")
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


def message_bytes_per_s(transport: Transport, n_bytes: int, budget: Budget) -> float:
    """Goodput from rank 0 to rank 1 by the code of the links workload; 0 on other ranks."""
    if transport.rank > 1:
        return 0.0
    _, times = time_pair((0, 1), [n_bytes], transport, budget)
    return n_bytes / median(times[n_bytes]) if transport.rank == 0 else 0.0


def busbw_bytes_per_s(transport: Transport, n_bytes: int, world: World, n: int) -> float:
    """Bus bandwidth of an all-reduce over all ranks, by the slowest rank's median time."""
    trial = make_trial("all_reduce", n_bytes, transport)
    times = maximum_over_ranks(time_trial(trial, transport, n + 1), world)[1:]
    trial.check()
    return bus_factor("all_reduce", transport.size) * trial.n_bytes / median(times)


def measure(options: Options, meeting: Meeting, addresses: list[str]) -> dict[str, list[float]]:
    """Measure all series in turn; all ranks must call it, and rank 0 gets the complete series."""
    world, n_bytes = meeting.world, parse_bytes(options.size)
    transports: list[Transport] = [TorchTransport.of(world, clock_for(world.device))]
    if world.mpi is not None:
        transports.append(MpiTransport(world.mpi))
    budget = Budget(time_s=options.seconds, n_min=3, n_warm_up=1)
    works: dict[str, Callable[[], float]] = {
        "iperf3": lambda: (
            iperf_bytes_per_s(addresses[1], options.iperf_port, options.seconds)
            if world.rank == 0
            else 0.0
        )
    }
    for transport in transports:
        works[f"send/recv {transport.name}"] = lambda t=transport: message_bytes_per_s(
            t, n_bytes, budget
        )
    works[f"all_reduce {transports[0].name}"] = lambda: busbw_bytes_per_s(
        transports[0], n_bytes, world, 4
    )
    series: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(options.pairs):
        # iperf3 alternately precedes and follows the others, so that it is always adjacent.
        for name in list(works) if turn % 2 == 0 else reversed(list(works)):
            dist.barrier()
            series[name].append(works[name]())
    return series


def report(options: Options, world: World, series: dict[str, list[float]]) -> None:
    """Print the ratio of every series to iperf3's; rank 0 only."""
    if not options.json:
        for name, rates in series.items():
            print(f"{name:20} {format_bandwidth(median(rates))}")
    place = f"{world.size} ranks on {len(set(world.hostnames))} hosts of {machine()}"
    names = [name for name in series if name != "iperf3"]
    show(
        [
            compare(f"{name} {options.size} / iperf3, bandwidth", series[name], series["iperf3"],
                    place=place)
            for name in names
        ],
        as_json=options.json,
    )  # fmt: skip


def main(options: Options) -> None:
    with joined("links_vs_iperf") as meeting:
        world = meeting.world
        if world.size < 2:
            raise EnvironmentSetupError("a link needs 2 ranks, this launch has 1: use mpirun -np 2")
        mine = next(i.address for i in list_interfaces() if i.name == world.interface)
        addresses = meeting.control.gather("addresses", mine, str)
        with iperf_server(options.iperf_port) if world.rank == 1 else nullcontext():
            dist.barrier()
            series = measure(options, meeting, addresses)
            dist.barrier()
        if world.is_first:
            report(options, world, series)


if __name__ == "__main__":
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # waiting ranks must not spin
    main(tyro.cli(Options, description=__doc__))

"""A rank's program for the tests: carries out runs in which rank 1 fails in a given way.

usage: faulty_ranks.py RESULTS [--resume] [--over-mpi] [--late-rank-0] FAULT...  (started by mpirun)

In every run, each rank's process is to have been told the interface that the ranks chose. With
--over-mpi runs are in the ranks' first processes, where rank 0 waits for rank 1 in MPI. With
--late-rank-0 it begins each run 1.5 s after rank 1.
"""

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from made_runs import workload_of

from harness.__main__ import _exit
from harness.cases import Case
from harness.errors import VerificationError
from harness.launch import Launcher, SweepEnded
from harness.runtime.ranks.environment import read_launch
from harness.runtime.ranks.isolate import start_fork_server
from harness.runtime.ranks.rendezvous import meet
from harness.workloads.common.flags import RunOptions


@dataclass(frozen=True, kw_only=True)
class Config:
    fault: str = "none"


def fail(fault):
    if fault == "oom":
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")
    if fault == "error":
        raise RuntimeError("rank 1 has a bug")
    if fault == "wrong":
        raise VerificationError("the product is off by 7")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)


def fill(directory):
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def strike(fault, context):
    """Kill or stop, from a rank's run, the rank's first process or the agent above it."""
    who, _, how = fault.partition("_")
    if context.world.rank != (0 if who == "zeroth" else 1):
        return
    if context.world.mpi is None:  # the parent is the fork server
        first = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    else:
        first = os.getpid()
    agent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    pids = [os.getpid(), first, agent]
    (context.run_dir.parent / "pids").write_text(" ".join(map(str, pids)))
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    os.kill(agent if who == "agent" else first, number)
    time.sleep(600)


def check_interface(world):
    told = os.environ.get("GLOO_SOCKET_IFNAME")
    if told != world.interface:
        raise RuntimeError(f"gloo was told {told}, the ranks chose {world.interface}")


def begin_late(channel):
    begin = channel.begin_run

    def begin_run(*args, **options):
        time.sleep(1.5)
        begin(*args, **options)

    channel.begin_run = begin_run


def body(config, context):
    check_interface(context.world)
    if "_" in config.fault:
        strike(config.fault, context)
    if context.world.rank == 1:
        fail(config.fault)
    if context.world.mpi is not None:
        context.world.mpi.Barrier()
    if context.world.rank == 0 and config.fault == "full":
        fill(context.run_dir.parent)
    total = torch.ones(1)
    dist.all_reduce(total)
    for step in range(200):
        context.recorder.sample("loss", float(total), step=step)
    return {"total": float(total)}


def main():
    results, *words = sys.argv[1:]
    faults = [word for word in words if not word.startswith("--")]
    start_fork_server(["torch", "harness.run"])
    meeting = meet(read_launch(os.environ), os.environ, heartbeat_timeout_s=6.0)
    if "--late-rank-0" in words and meeting.world.is_first:
        begin_late(meeting.channel)
    options = RunOptions(results=Path(results), run_timeout_s=10.0, resume="--resume" in words)
    workload = workload_of(Config, body, is_isolated="--over-mpi" not in words)
    cases = [Case(name="faulty", workload=workload, config=Config(fault=fault)) for fault in faults]
    try:
        headers = Launcher(meeting, options, sys.argv).run_cases(cases)
    except SweepEnded as ended:
        headers = ended.headers
        print(ended, file=sys.stderr)
    if meeting.world.is_first:
        print(" ".join(header.status for header in headers))
    meeting.leave()


if __name__ == "__main__":
    main()
    _exit(0)

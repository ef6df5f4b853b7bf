"""Search beside a running training: `python -m harness.plan.again PARENT`, with files of requests
on standard input and answers on standard output, each a line.

The search is a process of low priority, so the training process neither waits for it nor shares
its interpreter lock.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.plan.portfolio import search_portfolio
from harness.plan.request import PlanRequest
from harness.plan.simulate.options import SimulatorOptions

_PR_SET_PDEATHSIG = 1
# A step so much longer than the fastest is taken if the plan needs fewer devices.
_ABOUT_AS_FAST = 1.02
# A quarter of a core that training keeps busy; with less, an answer would take minutes there.
_NICENESS = 5


class SearchAgain(msgspec.Struct, frozen=True, kw_only=True):
    """The problem of a search beside training; the fields are those of PlanRequest.

    Attributes:
        cluster: the devices as they are now, with their drifted speeds or without a lost one.
        options: assumptions of the simulator.
        start: the strategy of now, from which the search starts too; None if it does not fit.
        most_replicas: see PlanRequest; the answer is then the plan with the fewest devices of those
            that are about as fast as the fastest.
    """

    graph: Graph
    cluster: Cluster
    profile: Profile
    options: SimulatorOptions
    batch: int
    memory_bytes: int | None = None
    budget: int | None = None
    seconds: float | None = None
    seed: int = 0
    start: Strategy | None = None
    most_replicas: int | None = None


class FoundAgain(msgspec.Struct, frozen=True, kw_only=True):
    """The answer.

    Attributes:
        strategy: the fastest one; None after an error.
        step_s: its predicted step.
        start_step_s: predicted step of the request's start on the same cluster.
        error: why nothing was found; empty otherwise.
    """

    strategy: Strategy | None = None
    step_s: float = 0.0
    start_step_s: float | None = None
    error: str = ""


def search_again(request: SearchAgain) -> FoundAgain:
    """Search by the request, with the state sharded that the start shards; errors are part of the
    answer."""
    running = "none" if request.start is None else request.start.shard_state
    try:
        found = search_portfolio(
            PlanRequest(
                cluster=request.cluster,
                graph=request.graph,
                profile=request.profile,
                batch=request.batch,
                memory_bytes=request.memory_bytes,
                budget=request.budget,
                seconds=request.seconds,
                seed=request.seed,
                start=request.start,
                shard_state=None if running == "none" else running,
                most_replicas=request.most_replicas,
            ),
            options=request.options,
        )
    except HarnessError as error:
        return FoundAgain(error=str(error))
    start = request.start
    best = found.best if request.most_replicas is None else found.leanest(_ABOUT_AS_FAST)
    return FoundAgain(
        strategy=found.strategy(best),
        step_s=best.step_s,
        start_step_s=None if start is None else found.simulator.step_s(start),
    )


def main() -> int:
    """Answer requests; ends with the process that asks, by its id."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it has ended already
        return 1
    os.nice(_NICENESS)
    importlib.import_module("harness.plan.simulate.lowering")  # numba, before the first request
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(Path(os.fsdecode(line[:-1])).read_bytes(), type=SearchAgain)
        sys.stdout.buffer.write(msgspec.json.encode(search_again(request)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

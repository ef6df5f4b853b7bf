"""Search beside a running training, and whether a change of strategy pays.

`python -m harness.plan.again PARENT` takes files of requests on standard input and gives answers on
standard output, each a line.

The search is a process of low priority, so the training process neither waits for it nor shares
its interpreter lock.
"""

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.plan.costs import PlanRequest
from harness.plan.portfolio import search_portfolio
from harness.plan.simulate.network import Network
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
    """Search by the request, with the state sharded that the start shards, else what memory needs,
    because the part of a lost rank would be lost; errors are part of the answer."""
    start = request.start
    shared = {name: getattr(request, name) for name in request.__struct_fields__}
    options = shared.pop("options")
    if start is not None and start.shard_state != "none":
        shared["shard_state"] = start.shard_state
    try:
        found = search_portfolio(PlanRequest(**shared, shards_for_speed=False), options=options)
    except HarnessError as error:
        return FoundAgain(error=str(error))
    best = found.best if request.most_replicas is None else found.leanest(_ABOUT_AS_FAST)
    return FoundAgain(
        strategy=found.strategy(best),
        step_s=best.step_s,
        start_step_s=None if start is None else found.simulator.step_s(start),
    )


def predict_change_s(cluster: Cluster, pair_bytes: Mapping[tuple[int, int], int]) -> float:
    """The time of the slowest link or NIC, all pairs of ranks sending at once: bytes by (sender,
    reader), as positions in `Cluster.devices`."""
    network, slowest_s = Network(cluster), 0.0
    sent, received = np.zeros((2, len(cluster.nodes)))
    for (a, b), n_bytes in pair_bytes.items():
        if n_bytes:
            slowest_s = max(slowest_s, network.latency_s[a, b] + n_bytes / network.bandwidth[a, b])
        source, target = network.node_of[a], network.node_of[b]
        sent[source] += n_bytes * (source != target)
        received[target] += n_bytes * (source != target)
    return float(max(slowest_s, (np.maximum(sent, received) / network.nic).max()))


def is_worth(before_s: float, after_s: float, n_steps_left: int, cost_s: float) -> bool:
    """Whether the steps that are left gain more than the change costs."""
    return (before_s - after_s) * n_steps_left > cost_s


def main() -> int:
    """Answer requests; ends with the process that asks, by its id."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it has ended already
        return 1
    os.nice(_NICENESS)
    importlib.import_module("harness.plan.simulate.lowering")  # numba, before the first request
    for line in sys.stdin.buffer:
        try:
            data = Path(os.fsdecode(line[:-1])).read_bytes()
        except FileNotFoundError:  # which the process that asks removes when it ends
            return 1
        request = msgspec.json.decode(data, type=SearchAgain)
        sys.stdout.buffer.write(msgspec.json.encode(search_again(request)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

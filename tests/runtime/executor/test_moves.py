"""What the simulator says travels is what the executor sends, copies of operators included."""

import math
from collections import Counter
from functools import cache

import msgspec
import pytest
import torch
from equivalence_cases import copied_case, random_case
from equivalence_models import described, small_task
from made_graphs import profile_by_keys, small_cluster
from torch import nn

from harness.domain.strategy import OperatorPlan
from harness.plan import builders
from harness.plan.simulate.simulator import Simulator, Trial
from harness.runtime.devices.precision import Precision
from harness.runtime.executor.geometry.layout import Layout
from harness.runtime.executor.transport.messages import shared_sums
from harness.runtime.models.task import InputSpec, Task
from harness.workloads.planning.config import SearchConfig

MODELS = ("mlp", "lenet", "alexnet", "vgg16", "resnet18", "vit")


@cache
def captured_of(model, batch):
    task = small_task(model, dtype=torch.float32)
    return described(task, batch)


def executed(layout, precision):
    """Bytes that travel, by (from, to, whether backward), and the sums."""
    moved, sums = Counter(), shared_sums(layout)

    def size(want, piece):
        dtype = layout.tensor(want.value).dtype
        if layout.is_made_of_weights(want.value):
            dtype = precision.transfer_dtype(dtype)
        return math.prod(layout.sizes_of(want.value, piece.region)) * dtype.itemsize

    for want in layout.wants:
        if want.number in sums:
            continue
        for piece in want.pieces:
            moved[piece.part.device, want.device, False] += size(want, piece)
        for piece in want.returns if want.value in layout.differentiable else ():
            moved[want.device, piece.part.device, True] += size(want, piece)
    between = {key: n for key, n in moved.items() if key[0] != key[1] and n}
    return between, {tuple(one) for one in sums.values()}


def simulated(graph, strategy, n_ranks, dtype):
    """The same by the simulator."""
    cluster = small_cluster(n_ranks)
    profile = profile_by_keys(graph, kind=cluster.devices[0].kind)
    options = SearchConfig(dtype=dtype).simulator_options()
    simulator = Simulator(graph, profile, cluster, options=options)
    trial = Trial(simulator, strategy)
    edges, n = trial.tables.edge_rows(), simulator.cluster.n_devices
    moved = Counter()
    for k in range(len(edges.source)):
        op, a = divmod(int(edges.source[k]), n)
        b = int(edges.target[k]) % n
        size = round(edges.n_bytes[k])
        if edges.goes[k]:
            moved[a, b, False] += size
        if edges.returns[k] and simulator.returns[op]:
            moved[b, a, True] += size
    partial = (one for one in edges.sums if not one.is_collective)
    sums = {(one.group, *(n > 0 for n in one.n_rounds)) for one in partial}
    return dict(moved), sums


@pytest.mark.parametrize(
    ("make_case", "dtype"), [(random_case, "fp32"), (copied_case, "fp32"), (random_case, "bf16")]
)
def test_what_travels_is_what_was_simulated(make_case, dtype):
    precision = Precision(dtype, torch.device("cpu"))
    n_equal = n_mixed = 0
    for index in range(64):
        case = make_case(5, index)
        strategy, sizes = case.strategy, case.strategy.microbatch_sizes()
        if case.model not in MODELS or case.n_ranks == 1 or len(set(sizes)) > 1:
            continue
        captured, meta = captured_of(case.model, strategy.batch)
        ours = executed(Layout(captured, meta, strategy, sizes[0]), precision)
        theirs = simulated(captured.graph, strategy, case.n_ranks, dtype)
        if ours[1] != theirs[1]:  # sums beside messages are simulated as messages alone
            assert not theirs[1]
            n_mixed += 1
            continue
        assert ours == theirs, case.name
        n_equal += 1
    assert n_equal > 8
    assert n_mixed <= 2


@pytest.mark.parametrize(
    ("plans", "sums"),
    [
        (
            {
                "query": OperatorPlan({"sample": 2, "contraction": 3}, [*range(6)]),
                "gelu": OperatorPlan({"sample": 6}, [*range(6)]),
            },
            {((0, 1, 2), True, True), ((3, 4, 5), True, True)},
        ),
        # Readers of both halves of the samples are on each device.
        ({"add": OperatorPlan({"sample": 4}, [0, 1, 1, 0])}, set()),
    ],
)
def test_what_no_sample_affects_travels_to_the_readers_of_the_samples_that_it_serves(plans, sums):
    captured, meta = captured_of("positions", 6)
    n_ranks = 6 if sums else 2
    alone = builders.ddp(captured.graph, small_cluster(n_ranks), 6)
    strategy = msgspec.structs.replace(alone, operators=alone.operators | plans)
    found = executed(Layout(captured, meta, strategy, 6), Precision("fp32", torch.device("cpu")))
    assert found == simulated(captured.graph, strategy, n_ranks, "fp32")
    assert found[1] == sums


class Thirds(nn.Module):
    """Multiplies and adds three parts of a layer's output."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        a, b, c = self.layer(x).chunk(3, -1)
        return self.head(a * b + c)


def test_all_elements_of_a_tuple_travel():
    task = Task(model=Thirds(), inputs=(InputSpec(name="x", shape=(8,)),), n_classes=4)
    captured, meta = described(task, 6)
    names = ("layer", "chunk"), ("mul", "add", "head", "loss")
    strategy = builders.pipeline(captured.graph, 6, names, [[0], [1]], n_microbatches=1)
    found = executed(Layout(captured, meta, strategy, 6), Precision("fp32", torch.device("cpu")))
    assert found == simulated(captured.graph, strategy, 2, "fp32")
    assert found[0] == dict.fromkeys([(0, 1, False), (1, 0, True)], 3 * 8 * 6 * 4)

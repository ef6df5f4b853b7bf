"""What ranks exchange in a step: statistics of norms, messages in order, partial sums, state."""

from functools import partial

import msgspec
import pytest
import torch
from equivalence_cases import random_case
from equivalence_check import assert_equal, reference
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond
from equivalence_exchanges import (
    gathered_bytes,
    joined_parameters,
    kept_bytes,
    norms_case,
    order_of_messages,
    read_ahead,
    sharded,
    third_branch_copied,
    train_in_int8,
    train_joined_on_rank_1,
    train_unrounded,
)
from equivalence_models import described, small_graph
from equivalence_named import case_of, make_case
from equivalence_ranks import local_world
from equivalence_reference import train_alone
from equivalence_training import (
    make_engine,
    merged,
    train_by_strategy,
    train_in_fp16,
    train_in_pairs,
)
from torch import nn

from harness.domain.partition import REPLICA, SAMPLE
from harness.domain.shard_state import SHARD_STATES
from harness.domain.sharding import CONTRACTION, has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import StrategyError
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.sharded.units import plan_exchanges
from harness.runtime.executor.shards.forms import choose_forms
from harness.runtime.models.task import InputSpec, Task


@pytest.fixture
def uneven_case():
    """Device 0 is fed more than its 2 MiB of weights by two microbatches, device 1 less."""
    stem, others = (OperatorPlan({"sample": [4, 1]}, [0, 1], stage) for stage in (0, 1))
    flow = {"n_microbatches": 2, "stages": [Stage(), Stage()]}
    return norms_case("wide_head", {"stem": stem}, 100, others=others, **flow)


def test_microbatches_are_joined_alike_where_weights_are_held_together(uneven_case, ranks):
    assert ranks.run(2, joined_parameters, uneven_case) == [0, 0]
    assert_equal(uneven_case, ranks)


def test_statistics_do_not_meet_gradients_that_start_when_each_device_has_them(uneven_case, ranks):
    found = merged(ranks.run(2, train_joined_on_rank_1, uneven_case))
    assert first_beyond(found, train_alone(uneven_case), FLOAT64_TOLERANCES["sgd"]) is None


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_of_a_norm_that_nobody_reads_takes_part_in_its_sums(recompute, ranks):
    norm = {"norm": OperatorPlan({"height": [6, 1]}, [0, 1])}
    case = norms_case("unread_row", norm, 4, stages=[Stage(recompute)])
    assert_equal(case, ranks)


def test_a_device_reads_all_samples_that_it_normalises(ranks):
    """Two of three blocks are on one device, which computes the whole norm for each of them."""
    norm = {"0": OperatorPlan({"sample": 3}, [0, 0, 1])}
    assert_equal(norms_case("normed_input", norm, 6), ranks)


# NCCL pairs sends and receives by their order.
@pytest.mark.parametrize("make", [third_branch_copied, read_ahead])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_messages_are_received_in_the_order_in_which_they_are_sent(way, make, ranks):
    first, second = (one[way] for one in ranks.run(2, order_of_messages, make()))
    assert (first[0], second[0]) == (second[1], first[1])
    assert max(map(len, [*first[0].values(), *second[0].values()])) > 1


# Over gloo too a message has no tag, then, by which it could be told from another.
@pytest.mark.parametrize(
    "make",
    [third_branch_copied, read_ahead, *(partial(random_case, 0, index) for index in (1, 10, 292))],
)
def test_what_order_alone_pairs_trains_the_same(make, ranks):
    case = make()
    found = merged(ranks.run(case.n_ranks, train_in_pairs, case))
    tolerance = FLOAT64_TOLERANCES[case.optimizer]
    assert first_beyond(found, reference(case, ranks), tolerance) is None


def test_a_message_that_waits_for_what_does_not_travel_trains_the_same(ranks):
    assert_equal(third_branch_copied(), ranks)


BATCH = 6


class Scaled(nn.Module):
    """One weight, used twice: the graph counts it for the first."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.scale).tanh() * self.scale


def test_copies_of_what_uses_weights_of_others_are_refused():
    task = Task(model=Scaled(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4)
    captured, meta = described(task, BATCH)
    *before, second, loss = [op.name for op in captured.graph.operators if has_tasks(op)]
    plans = {name: OperatorPlan({}, [0]) for name in (*before, loss)}
    plans[second] = OperatorPlan({REPLICA: 2}, [0, 1])
    plan = ExecutorPlan(strategy=Strategy(name="copies", batch=BATCH, operators=plans))
    with pytest.raises(StrategyError, match=f"'{second}' has copies, but uses the weights scale"):
        choose_forms(captured, meta, plan, [BATCH])


def by_sums(n_devices, batch, n_microbatches, loss):
    """Wide layers by features, narrow ones by contraction, the loss by samples or by all."""
    dims = iter(["feature", "feature", CONTRACTION] * 2 + [loss])
    plans = {
        operator.name: OperatorPlan({next(dims): n_devices}, list(range(n_devices)))
        for operator in filter(has_tasks, small_graph("towers").operators)
    }
    return Strategy(name="sums", batch=batch, operators=plans, n_microbatches=n_microbatches)


@pytest.mark.parametrize("n_microbatches", [1, 2])
@pytest.mark.parametrize("loss", [SAMPLE, REPLICA])
def test_shared_sums_train_what_one_device_trains(n_microbatches, loss, ranks):
    assert_equal(case_of("towers", by_sums(3, BATCH, n_microbatches, loss)), ranks)


@pytest.fixture
def case():
    return make_case("vit", "ddp", 2, 6, seed=4)  # small units


@pytest.mark.parametrize(
    ("n_ranks", "wanted"),
    [
        (2, {
            "none": [2, 2, 4],
            "optimizer": [2, 1, 2],  # with one microbatch
            "gradients": [2, 1, 2],
            "parameters": [1, 1, 2],
        }),
        (4, {  # in nodes of two ranks
            "optimizer_in_node": [4, 2, 4],
            "gradients_in_node": [4, 2, 4],
            "parameters_in_node": [2, 2, 4],
        }),
    ],
)  # fmt: skip
def test_each_rank_keeps_half_of_what_is_sharded(n_ranks, wanted, ranks):
    """All ranks together keep weights, gradients, and momenta with averages so many times; the
    buckets of unsharded gradients are kept for the next step."""
    case = make_case("vit", "ddp", n_ranks, seed=4)  # small units
    whole = sum(8 * p.numel() for p in case.make_task().model.parameters())
    found = {state: ranks.run(n_ranks, kept_bytes, sharded(case, state)) for state in wanted}
    assert wanted == {
        state: [sum(column) / whole for column in list(zip(*kept, strict=True))[:3]]
        for state, kept in found.items()
    }
    for kept in found.get("parameters", ()):
        assert kept.n_units > 6
        assert kept.most_units < 0.5 * whole
        assert kept.weights < 0.55 * whole


@pytest.mark.parametrize(
    ("hosts", "exchanges"),
    [
        # Of rank 3, which holds the second of ranks 1, 3, 5 and 7.
        ("aaaaaaaa", [[(1, (1,), (0,)), (5, (1,), (2,)), (7, (1,), (3,))]]),
        ("aaaabbbb", [[(7, (1,), (3,))], [(1, (1, 3), (0, 2))]]),
        ("abababab", [[(1, (1,), (0,)), (5, (1,), (2,)), (7, (1,), (3,))]]),
        ("aaaaaabb", [[(1, (1,), (0,)), (5, (1,), (2,)), (7, (1,), (3,))]]),
    ],
)
def test_a_part_crosses_once_to_each_node_of_equally_many_holders(hosts, exchanges):
    assert plan_exchanges((1, 3, 5, 7), 3, hosts) == exchanges


def test_segments_that_run_again_are_not_cut_for_their_units(case, ranks):
    whole, cut = [], []
    for found, segments in ((whole, 1), (cut, 16)):
        stages = [Stage(recompute=True, segments=segments)]
        strategy = msgspec.structs.replace(case.strategy, stages=stages)
        again = sharded(msgspec.structs.replace(case, strategy=strategy), "parameters")
        found += [kept.n_units for kept in ranks.run(2, kept_bytes, again)]
    assert (whole, cut) == ([9, 9], [6, 6])


@pytest.mark.parametrize(
    ("model", "n_ranks", "most"),
    [
        ("mlp", 2, 0.55),
        ("lenet", 2, 0.55),
        ("vit", 4, 0.7),  # between nodes, then within them
        ("gpt2", 2, 0.95),  # its embedding is tied, and most of its weights
    ],
)
def test_weights_that_autocast_rounds_travel_in_16_bits(model, n_ranks, most, ranks):
    case = sharded(make_case(model, "ddp", n_ranks, dtype="bfloat16"), "parameters")
    single = msgspec.structs.replace(case, dtype="float32")
    rounded, whole = (ranks.run(n_ranks, gathered_bytes, each)[0] for each in (case, single))
    assert 0.5 * whole <= rounded < most * whole
    found, expected = (
        merged(ranks.run(n_ranks, train, case)) for train in (train_by_strategy, train_unrounded)
    )
    assert first_beyond(found, expected, 0.0) is None


@pytest.mark.parametrize("state", ["none", "optimizer", "parameters", "gradients_in_node"])
def test_gradients_that_are_summed_as_int8_train_nearly_the_same(state, ranks):
    n_ranks = 4 if state.endswith("node") else 3
    case = sharded(make_case("lenet", "ddp", n_ranks, 12, dtype="float32"), state)
    exact, rounded = (
        merged(ranks.run(n_ranks, train, case)) for train in (train_by_strategy, train_in_int8)
    )
    # A bias may share its scale with weights, whose gradients are larger.
    assert first_beyond(rounded, exact, 0.1) is None
    assert first_beyond(rounded, exact, 1e-3) is not None


def test_a_step_that_overflows_changes_no_weights_in_parts(case, ranks):
    single = msgspec.structs.replace(case, dtype="float32")
    whole, parts = (
        ranks.run(2, train_in_fp16, sharded(single, state)) for state in ("none", "parameters")
    )
    for before, after in zip(whole, parts, strict=True):
        assert [changed for *_, changed in after] == [changed for *_, changed in before]
        assert not after[2][2]
        assert [loss for loss, *_ in after] == pytest.approx([loss for loss, *_ in before])


@pytest.mark.parametrize(
    ("shape", "n", "intervals"),
    [
        ((4, 3), 2, [((0, 2), (0, 3)), ((2, 4), (0, 3))]),
        ((1, 5), 2, [((0, 1), (0, 2)), ((0, 1), (2, 5))]),
        ((2,), 3, [None, ((0, 1),), ((1, 2),)]),
        ((1, 1), 2, [None, ((0, 1), (0, 1))]),
        ((), 2, [None, ()]),
    ],
)
def test_parts_are_rows_of_the_first_dim_longer_than_1(shape, n, intervals):
    piece = WeightSlice("w", tuple((0, size) for size in shape))
    found = [piece.part(k, n) for k in range(n)]
    assert [None if part is None else part.intervals for part in found] == intervals


def test_a_hook_needs_whole_gradients():
    case = make_case("hooked_weights", "single", 1, 6)
    for state in SHARD_STATES[1:]:
        with pytest.raises(StrategyError, match="has a hook on its whole gradient"):
            make_engine(sharded(case, state), local_world(0, 1))

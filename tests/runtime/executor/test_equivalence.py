"""Whatever the strategy, training is that of one device: on ranks over gloo, in float64."""

from pathlib import Path

import msgspec
import pytest
import torch
from equivalence_cases import Case, any_case, copied_case, random_case
from equivalence_check import assert_equal, check
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond, worst
from equivalence_models import small_graph
from equivalence_ranks import RanksFailedError, local_world
from equivalence_reference import Trace, train_alone, train_alone_asynchronously
from equivalence_strategies import hand_split_alexnet, named_strategies
from equivalence_training import (
    closing,
    make_engine,
    merged,
    most_sending,
    n_synchronisations,
    samples_of_joined_products,
    sends_kept,
    spans_of_a_step,
    steps_alone,
    train_by_ddp,
    train_by_strategy,
)
from made_graphs import replicated_pipeline

from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import ModelError

TOLERANCE = FLOAT64_TOLERANCES["sgd"]


def make_case(model, strategy, n_ranks, **changes):
    return Case(name=strategy.name, model=model, n_ranks=n_ranks, strategy=strategy, **changes)


def named(model, n_ranks, batch, name):
    return named_strategies(small_graph(model), n_ranks, batch)[name]


def assert_as_stale_as_stated(case, ranks):
    found, wanted = ranks.train(case), train_alone_asynchronously(case)
    assert first_beyond(found, wanted, FLOAT64_TOLERANCES[case.optimizer]) is None
    return found


# Each gave another gradient, or none.
FOUND = sorted((Path(__file__).parents[2] / "cases" / "strategies").glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_cases_that_were_once_wrong_equal_one_device(path, ranks):
    assert_equal(msgspec.json.decode(path.read_bytes(), type=Case), ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(8))
def test_random_strategies_on_a_gpu_train_what_the_cpu_trains(index, gpu_ranks):
    assert_equal(any_case(1, index), gpu_ranks)


@pytest.mark.parametrize("name", ["ddp", "1f1b"])
def test_compiled_segments_train_what_one_device_trains(name, ranks):
    case = make_case("mlp", named("mlp", 2, 8, name), 2, backend="aot_eager")
    assert_equal(case, ranks)


def test_sparse_gradients_are_trained_as_dense_ones(ranks):
    case = make_case("sparse_rows", named("sparse_rows", 2, 8, "ddp"), 2)
    wanted = train_alone(msgspec.structs.replace(case, model="dense_rows"))
    assert first_beyond(ranks.train(case), wanted, TOLERANCE) is None


# One of each model, on 2 and 3 ranks, then all schedules; the rest is in the slow set.
@pytest.mark.parametrize("index", [0, 1, 7, 14, 16, 21, 22, 24, 26, 27])
def test_random_strategies_train_what_one_device_trains(index, ranks):
    case = random_case(1, index)
    assert_equal(msgspec.structs.replace(case, n_ranks=max(case.n_ranks, 2)), ranks)


@pytest.mark.parametrize(
    ("index", "model"),
    [
        (10, "lstm"),  # a tuple among a tuple's elements
        (35, "vit"),  # an attention cut by sequence, the first of a tuple
        (41, "tokens"),  # deferred gradients of weights that several devices hold
        (207, "lstm_time_first"),  # samples behind another dim
        (237, "tokens"),  # tied weights, one of them cut
        (167, "tokens"),  # tied weights, which a shard has a tensor of its own for
        (292, "branchy"),  # a value that several stages of a device fetch
        (18, "resnet18"),  # running statistics of tasks that share them
    ],
)
def test_strategies_that_once_trained_another_model(index, model, ranks):
    case = random_case(0, index)
    assert case.model == model
    assert_equal(case, ranks)


def cut_before_what_works_in_place():
    """The convolution on device 0, what works in place on what it sends on device 1."""
    stage_of = {"conv": 0, "add_": 1, "relu": 1, "add": 1, "flatten": 1, "classify": 1}
    stage_of["loss"] = 1
    strategy = Strategy(
        name="cut before add_",
        batch=8,
        operators={name: OperatorPlan({}, [s], s) for name, s in stage_of.items()},
        n_microbatches=2,
        stages=[Stage()] * 2,
    )
    return Case(name=strategy.name, model="branching", n_ranks=2, strategy=strategy)


def test_an_exported_operator_leaves_what_it_is_sent_as_it_is(ranks):
    assert_equal(cut_before_what_works_in_place(), ranks)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("make", "seed"), [(random_case, 0), (copied_case, 3)])
def test_more_random_strategies_train_what_one_device_trains(make, seed, ranks):
    findings = [check(make(seed, index), ranks) for index in range(70)]
    unequal = [finding.text() for finding in findings if not finding.is_equal]
    assert not unequal, "\n".join(unequal)


# One of each kind of layers, on 2 to 5 ranks; the rest is in the slow set.
@pytest.mark.parametrize("index", [0, 1, 18, 7, 8, 10, 12, 13])
def test_copies_of_operators_train_what_one_device_trains(index, ranks):
    assert_equal(copied_case(2, index), ranks)


@pytest.mark.parametrize(
    "name",
    [
        "single", "ddp", "ddp by speed", "tensor parallel", "gpipe", "1f1b",
        "zero_bubble", "interleaved", "2-1 1f1b", "2-1 gpipe", "2-1 zero_bubble", "1-2",
    ],
)  # fmt: skip
def test_named_strategies_train_what_one_device_trains(name, ranks):
    assert_equal(make_case("mlp", named("mlp", 3, 12, name), 3), ranks)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dlrm_cat", "tables on devices"),
        ("dlrm_dot", "tables on devices"),
        ("vit", "tensor parallel"),
        ("alexnet", "hybrid"),
        ("branchy", "ddp by speed"),
        ("lstm", "2-1 1f1b"),
    ],
)
def test_strategies_that_suit_a_model(model, name, ranks):
    assert_equal(make_case(model, named(model, 3, 12, name), 3), ranks)


@pytest.mark.parametrize(
    ("name", "dropout"), [("ddp", "off"), ("tensor parallel", "exact"), ("1f1b", "exact")]
)
def test_a_model_that_must_be_exported(name, dropout, ranks):
    assert_equal(make_case("exported", named("exported", 2, 8, name), 2, dropout=dropout), ranks)


@pytest.mark.parametrize("name", ["ddp", "ddp by speed", "2-1 1f1b"])
def test_rows_of_several_samples_are_cut_between_samples(name, ranks):
    assert_equal(make_case("merged_rows", named("merged_rows", 3, 10, name), 3), ranks)


@pytest.mark.parametrize("name", ["ddp", "gpipe", "zero_bubble"])
# Gradients of linear layers written in place, of microbatches apart; neither, and joined.
@pytest.mark.parametrize(("batch", "seed"), [(8, 0), (9, 1)])
def test_weights_that_are_computed_are_trained(name, batch, seed, ranks):
    strategy = named("normed_weights", 2, batch, name)
    assert_equal(make_case("normed_weights", strategy, 2, seed=seed), ranks)


def test_a_forward_that_is_run_again_leaves_running_statistics_as_they_are(ranks):
    strategy = replicated_pipeline(
        small_graph("tracked_norms"), 8, [[0], [1]], n_microbatches=1, recompute=True
    )
    assert_equal(make_case("tracked_norms", strategy, 2), ranks)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize(
    ("recompute", "seed"),
    [(False, 1), (True, 0)],  # gradients of microbatches joined, and apart
)
def test_three_replicas_feed_one_under_every_schedule(schedule, recompute, seed, ranks):
    devices = [[0, 1, 2], [3]]
    strategy = replicated_pipeline(
        small_graph("lenet"), 14, devices, n_microbatches=4, schedule=schedule, recompute=recompute
    )
    assert [len(own) for own in strategy.stage_devices()] == [3, 1]
    assert_equal(make_case("lenet", strategy, 4, seed=seed), ranks)


def test_a_forward_is_repeated_while_its_gradients_are_on_their_way(ranks):
    strategy = replicated_pipeline(
        small_graph("lenet"), 4, [[0], [1]], n_microbatches=2, schedule="gpipe", recompute=True
    )
    first, _ = ranks.run(2, spans_of_a_step, make_case("lenet", strategy, 2))
    found = [(s.pass_, s.microbatch) for s in first if s.pass_ == "recompute" or s.is_wait]
    awaited = [one for one in found if one[0] is not None]  # all but the end of sends
    assert awaited == [("recompute", 0), ("backward", 0), ("recompute", 1), ("backward", 1)]


def test_a_forward_is_not_repeated_where_its_backward_comes_next(ranks):
    strategy = replicated_pipeline(
        small_graph("lenet"), 4, [[0], [1]], n_microbatches=2, schedule="1f1b", recompute=True
    )
    found = ranks.run(2, spans_of_a_step, make_case("lenet", strategy, 2))
    n_repeated = [len([s for s in spans if s.pass_ == "recompute"]) for spans in found]
    assert n_repeated[0] > 0 == n_repeated[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_microbatches_of_unlike_sizes_are_joined(schedule, ranks):
    strategy = replicated_pipeline(
        small_graph("lenet"), 11, [[0], [1]], n_microbatches=3, schedule=schedule
    )
    assert sorted(strategy.microbatch_sizes()) == [3, 4, 4]
    found = ranks.run(2, samples_of_joined_products, make_case("lenet", strategy, 2, seed=1))
    # Each of the two convolutions by one product over all samples.
    assert [n for own in found for n in own] == [11, 11]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50_deep", "resnet152_deep"])
@pytest.mark.parametrize("name", ["ddp", "1f1b", "tensor parallel"])
def test_real_depths(model, name, ranks):
    strategy = named(model, 2, 8, name)
    assert_equal(make_case(model, strategy, 2, optimizer="slow sgd", n_steps=2), ranks)


def test_only_ranks_that_hold_the_same_weights_sum_gradients(ranks):
    strategy = replicated_pipeline(small_graph("lenet"), 6, [[0, 1], [2]], n_microbatches=2)
    found = ranks.run(3, n_synchronisations, make_case("lenet", strategy, 3))
    assert [n_sums > 0 for n_sums in found] == [True, True, False]


def test_without_a_flush_every_microbatch_sums_gradients(ranks):
    strategy = replicated_pipeline(small_graph("lenet"), 6, [[0, 1], [2]], n_microbatches=3)
    case = make_case("lenet", strategy, 3)
    n_sums, *_ = ranks.run(3, n_synchronisations, case)
    case = msgspec.structs.replace(case, is_asynchronous=True)
    assert ranks.run(3, n_synchronisations, case) == [3 * n_sums, 3 * n_sums, 0]


def test_sharded_gradients_are_summed_after_every_microbatch(ranks):
    counts = []
    for n_microbatches in (1, 3):
        strategy = replicated_pipeline(
            small_graph("lenet"), 6, [[0, 1], [2]], n_microbatches=n_microbatches
        )
        strategy = msgspec.structs.replace(strategy, shard_state="gradients")
        counts.append(ranks.run(3, n_synchronisations, make_case("lenet", strategy, 3)))
    once, thrice = counts
    assert once[0] > 0
    assert thrice == [3 * n for n in once]


def unlike_stages(is_asynchronous):
    strategy = replicated_pipeline(small_graph("lenet"), 6, [[0, 1], [2]], n_microbatches=3)
    return make_case("lenet", strategy, 3, is_asynchronous=is_asynchronous)


def indices_elsewhere():
    """What tables look up is sent to them."""
    graph = small_graph("dlrm_cat")
    tables = {op.name for op in graph.operators if op.kind == "embedding"}
    plans = {
        op.name: OperatorPlan({}, [int(op.name in tables)])
        for op in graph.operators
        if has_tasks(op)
    }
    return Strategy(name="indices elsewhere", batch=6, operators=plans)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_case("lenet", named("lenet", 3, 6, "ddp"), 3),
        lambda: make_case("mlp", named("mlp", 2, 6, "tensor parallel"), 2),
        lambda: make_case("resnet18", named("resnet18", 2, 6, "hybrid"), 2),
        lambda: unlike_stages(is_asynchronous=False),
        lambda: unlike_stages(is_asynchronous=True),
        lambda: make_case("dlrm_cat", indices_elsewhere(), 2),
    ],
    ids=["ddp", "tensor parallel", "hybrid", "pipeline", "asynchronous pipeline", "indices"],
)
def test_a_step_without_communication_computes_all_and_waits_for_nobody(make, ranks):
    case = make()
    for together, alone, can_skip in ranks.run(case.n_ranks, steps_alone, case):
        assert can_skip
        assert alone == [(kind, name) for kind, name in together if not name.startswith("bucket")]


def test_nothing_is_left_of_an_engine_that_was_closed(ranks):
    case = make_case("mlp", named("mlp", 3, 6, "hybrid"), 3)
    for n_made, n_left, is_freed in ranks.run(3, closing, case):
        assert n_made > 0
        assert (n_left, is_freed) == (0, True)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_has_been_read_is_not_kept_until_the_step_ends(schedule, ranks):
    strategy = replicated_pipeline(
        small_graph("mlp"), 16, [[0], [1], [2]], n_microbatches=16, schedule=schedule
    )
    kept = ranks.run(3, most_sending, make_case("mlp", strategy, 3))
    # A pipeline of three has three microbatches in flight, each sent forward and back.
    assert max(kept) <= 6


def test_what_a_rank_reads_that_sends_nothing_back_is_let_go_of_without_a_flush(ranks):
    graph = small_graph("dlrm_cat")

    def plan(op):
        if op.name.startswith("getitem"):  # of indices, which have no gradient
            return OperatorPlan({}, [0], 0)
        return OperatorPlan({}, [1], 0) if "bottom" in op.name else OperatorPlan({}, [2], 1)

    plans = {op.name: plan(op) for op in graph.operators if has_tasks(op)}
    strategy = Strategy(
        name="indices apart", batch=6, operators=plans, n_microbatches=2, schedule="1f1b",
        stages=[Stage()] * 2,
    )  # fmt: skip
    case = make_case("dlrm_cat", strategy, 3, is_asynchronous=True)
    assert_as_stale_as_stated(case, ranks)
    kept, *_ = ranks.run(3, sends_kept, case)
    # For three tables, those of the step's two microbatches and of one in flight when it began.
    assert kept == [6, 9, 9, 9, 9, 9]


@pytest.mark.parametrize("dim", ["feature", "sample", "height"])
def test_a_hand_split_alexnet_trains_its_one_classifier_on_all_rows(dim, ranks):
    strategy = hand_split_alexnet(small_graph("alexnet"), 6, dim=dim)
    case = make_case("alexnet", strategy, 2, n_steps=5)
    assert_equal(case, ranks)


def test_local_batch_norm_is_that_of_ddp(ranks):
    strategy = named("resnet18", 2, 8, "ddp")
    case = make_case("resnet18", strategy, 2, batch_norm="local", seed=3)
    ours = merged(ranks.run(2, train_by_strategy, case))
    theirs = merged(ranks.run(2, train_by_ddp, case))
    # DDP adds the same two gradients, so it rounds alike up to the order within a rank.
    ours = Trace(losses=ours.losses, gradients=[], state=ours.state)
    assert worst(ours, theirs).difference < TOLERANCE
    alone = train_alone(case)
    assert abs(ours.losses[0] - alone.losses[0]) > 1e-3


@pytest.mark.parametrize(
    ("n_ranks", "devices", "n_microbatches", "optimizer"),
    [
        (3, [[0], [1], [2]], 5, "sgd"),
        (3, [[0, 1], [2]], 5, "adamw"),
        (4, [[1], [0, 2], [3]], 5, "sgd"),
        (4, [[0], [1], [2], [3]], 2, "adamw"),
        (3, [[0], [2], [1]], 1, "sgd"),
    ],
)
def test_asynchronous_1f1b_trains_with_weights_as_stale_as_stated(
    n_ranks, devices, n_microbatches, optimizer, ranks
):
    graph = small_graph("lenet")
    strategy = replicated_pipeline(graph, 12, devices, n_microbatches=n_microbatches)
    case = make_case("lenet", strategy, n_ranks, is_asynchronous=True, optimizer=optimizer, seed=3)
    found = assert_as_stale_as_stated(case, ranks)
    synchronous = msgspec.structs.replace(case, is_asynchronous=False)
    assert worst(found, train_alone(synchronous)).difference > 1e-2


def test_asynchronous_training_refuses_a_weight_that_two_stages_update(ranks):
    strategy = replicated_pipeline(small_graph("tokens"), 6, [[0], [1]], n_microbatches=3)
    case = make_case("tokens", strategy, 2, is_asynchronous=True)
    with pytest.raises(RanksFailedError, match=r"'embedding.weight' is tied over stages \[0, 1\]"):
        ranks.train(case)


def test_masks_differ_between_steps_microbatches_and_layers(ranks):
    strategy = named("mlp", 2, 8, "ddp")
    case = make_case("mlp", strategy, 2, dropout="exact")
    off = make_case("mlp", strategy, 2)
    other = msgspec.structs.replace(case, strategy=named("mlp", 2, 8, "gpipe"))
    with_masks = ranks.train(case)
    assert worst(with_masks, ranks.train(off)).difference > 1e-2
    # Four microbatches draw other masks than one.
    assert worst(with_masks, ranks.train(other)).difference > 1e-2
    dropped = with_masks.gradients[0]["layers.0.weight"], with_masks.gradients[1]["layers.0.weight"]
    assert not torch.equal(*dropped)


def test_exact_dropout_refuses_an_attention_that_drops_within_itself():
    case = make_case("vit", named("vit", 1, 4, "single"), 1, dropout="exact")
    task = case.make_task()
    attention = next(m for m in task.model.modules() if isinstance(m, torch.nn.MultiheadAttention))
    attention.dropout = 0.1
    with pytest.raises(ModelError, match=r"self_attention' \(MultiheadAttention\) draws random"):
        make_engine(case, task, local_world(0, 1))

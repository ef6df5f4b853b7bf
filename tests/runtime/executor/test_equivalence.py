"""Whatever the strategy, training is that of one device: on ranks over gloo, in float64."""

from pathlib import Path

import msgspec
import pytest
import torch
from equivalence_cases import Case, any_case, copied_case, random_case
from equivalence_check import assert_equal, check
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond, worst
from equivalence_exchanges import sharded
from equivalence_models import small_graph
from equivalence_named import case_of, make_case, pipeline_case
from equivalence_ranks import RanksFailedError, local_world
from equivalence_reference import Trace, train_alone, train_alone_asynchronously
from equivalence_strategies import hand_split_alexnet
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

from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import ModelError

TOLERANCE = FLOAT64_TOLERANCES["sgd"]


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


def test_sparse_gradients_are_trained_as_dense_ones(ranks):
    case = make_case("sparse_rows", "ddp")
    wanted = train_alone(msgspec.structs.replace(case, model="dense_rows"))
    assert first_beyond(ranks.train(case), wanted, TOLERANCE) is None


# On 2 to 5 ranks; other models have copies of operators below, and the rest is in the slow set.
@pytest.mark.parametrize("index", [1, 14, 16, 22, 27])
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


@pytest.mark.parametrize(
    ("model", "sender", "receiver"),
    [
        ("branching", "conv", "add_ relu add flatten classify loss"),  # an exported model
        ("changed_copy", "first unflatten getitem", "flatten mul_ second flatten_1 third add loss"),
    ],
)
def test_an_operator_leaves_a_received_value_as_it_is(model, sender, receiver, ranks):
    """Device 1 works in place on what device 0 sends."""
    stage_of = {**dict.fromkeys(sender.split(), 0), **dict.fromkeys(receiver.split(), 1)}
    strategy = Strategy(
        name="cut before add_",
        batch=8,
        operators={name: OperatorPlan({}, [s], s) for name, s in stage_of.items()},
        n_microbatches=2,
        stages=[Stage()] * 2,
    )
    assert_equal(case_of(model, strategy), ranks)


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


MLP_NAMES = (
    "single", "ddp", "ddp by speed", "tensor parallel", "gpipe", "1f1b",
    "zero_bubble", "interleaved", "1-2",
)  # fmt: skip
NAMED = [
    *(("mlp", name, 3, 12, {}) for name in MLP_NAMES),
    # Strategies that suit a model.
    ("dlrm_cat", "tables on devices", 3, 12, {}),
    ("dlrm_dot", "tables on devices", 3, 12, {}),
    ("vit", "tensor parallel", 3, 12, {}),
    ("alexnet", "hybrid", 3, 12, {}),
    ("branchy", "ddp by speed", 3, 12, {}),
    ("lstm", "2-1 1f1b", 3, 12, {}),
    # A model that must be exported.
    ("exported", "ddp", 2, 8, {}),
    *(("exported", name, 2, 8, {"dropout": "exact"}) for name in ("tensor parallel", "1f1b")),
    # Rows of several samples, which are cut between samples.
    *(("merged_rows", name, 3, 10, {}) for name in ("ddp by speed", "2-1 1f1b")),
    # Weights that are computed: gradients of linear layers written in place, of microbatches apart;
    # neither, and joined.
    *(
        ("normed_weights", name, 2, 8 + seed, {"seed": seed})
        for name in ("ddp", "zero_bubble")
        for seed in (0, 1)
    ),
    # Compiled segments.
    ("mlp", "1f1b", 2, 8, {"backend": "aot_eager"}),
]


@pytest.mark.parametrize(("model", "name", "n_ranks", "batch", "changes"), NAMED)
def test_named_strategies_train_what_one_device_trains(model, name, n_ranks, batch, changes, ranks):
    assert_equal(make_case(model, name, n_ranks, batch, **changes), ranks)


def test_a_forward_that_is_run_again_leaves_running_statistics_as_they_are(ranks):
    assert_equal(pipeline_case("tracked_norms", 8, [[0], [1]], 1, recompute=True), ranks)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize(
    ("recompute", "seed"),
    [(False, 1), (True, 0)],  # gradients of microbatches joined, and apart
)
def test_three_replicas_feed_one_under_every_schedule(schedule, recompute, seed, ranks):
    flow = {"schedule": schedule, "recompute": recompute}
    case = pipeline_case("lenet", 14, [[0, 1, 2], [3]], 4, seed=seed, **flow)
    assert [len(own) for own in case.strategy.stage_devices()] == [3, 1]
    assert_equal(case, ranks)


def test_a_forward_is_repeated_while_its_gradients_are_on_their_way(ranks):
    case = pipeline_case("lenet", 4, [[0], [1]], 2, schedule="gpipe", recompute=True)
    first, _ = ranks.run(2, spans_of_a_step, case)
    found = [(s.pass_, s.microbatch) for s in first if s.pass_ == "recompute" or s.is_wait]
    awaited = [one for one in found if one[0] is not None]  # all but the end of sends
    assert awaited == [("recompute", 0), ("backward", 0), ("recompute", 1), ("backward", 1)]


def test_a_forward_is_not_repeated_where_its_backward_comes_next(ranks):
    case = pipeline_case("lenet", 4, [[0], [1]], 2, recompute=True)
    found = ranks.run(2, spans_of_a_step, case)
    n_repeated = [len([s for s in spans if s.pass_ == "recompute"]) for spans in found]
    assert n_repeated[0] > 0 == n_repeated[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_microbatches_of_unlike_sizes_are_joined(schedule, ranks):
    case = pipeline_case("lenet", 11, [[0], [1]], 3, schedule=schedule, seed=1)
    assert sorted(case.strategy.microbatch_sizes()) == [3, 4, 4]
    found = ranks.run(2, samples_of_joined_products, case)
    # Each of the two convolutions by one product over all samples.
    assert [n for own in found for n in own] == [11, 11]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50_deep", "resnet152_deep"])
@pytest.mark.parametrize("name", ["ddp", "1f1b", "tensor parallel"])
def test_real_depths(model, name, ranks):
    assert_equal(make_case(model, name, optimizer="slow sgd", n_steps=2), ranks)


def unlike_stages(n_microbatches=3, **changes):
    return pipeline_case("lenet", 6, [[0, 1], [2]], n_microbatches, **changes)


def test_ranks_that_hold_the_same_weights_sum_gradients_as_often_as_these_are_used(ranks):
    def n_sums(case):
        return ranks.run(3, n_synchronisations, case)

    once = n_sums(unlike_stages())
    assert [n > 0 for n in once] == [True, True, False]
    # Without a flush, or to their owners, after every microbatch.
    assert n_sums(unlike_stages(is_asynchronous=True)) == [3 * n for n in once]
    scattered = [n_sums(sharded(unlike_stages(n), "gradients")) for n in (1, 3)]
    assert scattered[0][0] > 0
    assert scattered[1] == [3 * n for n in scattered[0]]


def test_sums_between_nodes_are_once_a_step(ranks):
    def n_sums(n_microbatches):
        case = pipeline_case("lenet", 12, [[0, 1, 2, 3]], n_microbatches)
        return ranks.run(4, n_synchronisations, sharded(case, "gradients_in_node"))[0]

    once = n_sums(1)
    assert once > 0
    assert n_sums(3) == once // 2 * (3 + 1)


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
        lambda: make_case("lenet", "ddp", 3, 6),
        lambda: make_case("mlp", "tensor parallel", 2, 6),
        lambda: make_case("resnet18", "hybrid", 2, 6),
        unlike_stages,
        lambda: unlike_stages(is_asynchronous=True),
        lambda: case_of("dlrm_cat", indices_elsewhere()),
    ],
    ids=["ddp", "tensor parallel", "hybrid", "pipeline", "asynchronous pipeline", "indices"],
)
def test_a_step_without_communication_computes_all_and_waits_for_nobody(make, ranks):
    case = make()
    for together, alone, can_skip in ranks.run(case.n_ranks, steps_alone, case):
        assert can_skip
        assert alone == [(kind, name) for kind, name in together if not name.startswith("bucket")]


def test_nothing_is_left_of_an_engine_that_was_closed(ranks):
    case = make_case("mlp", "hybrid", 3, 6)
    for n_made, n_left, is_freed in ranks.run(3, closing, case):
        assert n_made > 0
        assert (n_left, is_freed) == (0, True)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_has_been_read_is_not_kept_until_the_step_ends(schedule, ranks):
    case = pipeline_case("mlp", 16, [[0], [1], [2]], 16, schedule=schedule)
    kept = ranks.run(3, most_sending, case)
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
    case = case_of("dlrm_cat", strategy, is_asynchronous=True)
    assert_as_stale_as_stated(case, ranks)
    kept, *_ = ranks.run(3, sends_kept, case)
    # For three tables, those of the step's two microbatches and of one in flight when it began.
    assert kept == [6, 9, 9, 9, 9, 9]


@pytest.mark.parametrize("dim", ["feature", "sample", "height"])
def test_a_hand_split_alexnet_trains_its_one_classifier_on_all_rows(dim, ranks):
    strategy = hand_split_alexnet(small_graph("alexnet"), 6, dim=dim)
    assert_equal(case_of("alexnet", strategy, n_steps=5), ranks)


def test_local_batch_norm_is_that_of_ddp(ranks):
    case = make_case("resnet18", "ddp", batch_norm="local", seed=3)
    ours = merged(ranks.run(2, train_by_strategy, case))
    theirs = merged(ranks.run(2, train_by_ddp, case))
    # DDP adds the same two gradients, so it rounds alike up to the order within a rank.
    ours = Trace(losses=ours.losses, gradients=[], state=ours.state)
    assert worst(ours, theirs).difference < TOLERANCE
    alone = train_alone(case)
    assert abs(ours.losses[0] - alone.losses[0]) > 1e-3


@pytest.mark.parametrize(
    ("devices", "n_microbatches", "optimizer"),
    [
        ([[0], [1], [2]], 5, "sgd"),
        ([[0, 1], [2]], 5, "adamw"),
        ([[1], [0, 2], [3]], 5, "sgd"),
        ([[0], [1], [2], [3]], 2, "adamw"),
        ([[0], [2], [1]], 1, "sgd"),
    ],
)
def test_asynchronous_1f1b_trains_with_weights_as_stale_as_stated(
    devices, n_microbatches, optimizer, ranks
):
    more = {"is_asynchronous": True, "optimizer": optimizer, "seed": 3}
    case = pipeline_case("lenet", 12, devices, n_microbatches, **more)
    found = assert_as_stale_as_stated(case, ranks)
    synchronous = msgspec.structs.replace(case, is_asynchronous=False)
    assert worst(found, train_alone(synchronous)).difference > 1e-2


def test_asynchronous_training_refuses_a_weight_that_two_stages_update(ranks):
    case = pipeline_case("tokens", 6, [[0], [1]], 3, is_asynchronous=True)
    with pytest.raises(RanksFailedError, match=r"'embedding.weight' is tied over stages \[0, 1\]"):
        ranks.train(case)


def test_masks_differ_between_steps_microbatches_and_layers(ranks):
    with_masks = ranks.train(make_case("mlp", "ddp", dropout="exact"))
    # Four microbatches draw other masks than one.
    for other in (make_case("mlp", "ddp"), make_case("mlp", "gpipe", dropout="exact")):
        assert worst(with_masks, ranks.train(other)).difference > 1e-2
    dropped = with_masks.gradients[0]["layers.0.weight"], with_masks.gradients[1]["layers.0.weight"]
    assert not torch.equal(*dropped)


def test_exact_dropout_refuses_an_attention_that_drops_within_itself():
    case = make_case("vit", "single", 1, 4, dropout="exact")
    task = case.make_task()
    attention = next(m for m in task.model.modules() if isinstance(m, torch.nn.MultiheadAttention))
    attention.dropout = 0.1
    with pytest.raises(ModelError, match=r"self_attention' \(MultiheadAttention\) draws random"):
        make_engine(case, local_world(0, 1), task=task)

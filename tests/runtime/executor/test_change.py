"""A training that changes its strategy between steps equals one device."""

import pytest
import torch
from change_cases import ChangingCase, random_changing_case, train_alone
from change_check import check_change
from change_training import (
    change_often,
    change_with_a_fault,
    freeze_and_count,
    layer_norms,
    running_means,
    survive_the_last_change,
)
from equivalence_models import small_graph
from equivalence_named import case_of, strategies
from equivalence_training import merged
from msgspec.structs import replace

from harness.domain.cluster import Cluster
from harness.domain.freezing import frozen_operators
from harness.errors import ResultsError, StrategyError
from harness.plan.again import SearchAgain, search_again
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.plan.simulate.options import SimulatorOptions
from harness.runtime.executor.change.transfer import _bits, find_migrations
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.state.files import load_sharded

MIB = 1 << 20


def changing_case(model, *named, at=(2,), frozen=(), **changes):
    """From one named strategy to the next; each is (ranks used, name)."""
    first, *others = (strategies(model, n, 6)[name] for n, name in named)
    joined, n_ranks = " to ".join(name for _, name in named), max(n for n, _ in named)
    case = case_of(model, first, name=joined, n_ranks=n_ranks, n_steps=5, **changes)
    changes = list(zip(at, others, strict=True))
    return ChangingCase(case=case, changes=changes, frozen=list(frozen))


def assert_equal(changing, ranks):
    finding = check_change(changing, ranks)
    assert finding.is_equal, finding.text()
    return finding


@pytest.mark.parametrize(
    ("model", "named", "more"),
    [
        (
            "mlp",
            [(1, "single"), (3, "ddp"), (2, "1f1b")],
            {"at": (1, 3), "optimizer": "adamw", "seed": 3},
        ),
        ("lenet", [(3, "tensor parallel"), (2, "1f1b")], {}),
        ("vit", [(2, "1f1b"), (3, "tensor parallel")], {"dropout": "exact"}),
        ("resnet18", [(2, "ddp"), (1, "single"), (2, "1f1b")], {"at": (1, 4)}),
        ("tokens", [(2, "hybrid"), (1, "single")], {"optimizer": "adamw"}),
        ("dlrm_cat", [(1, "single"), (2, "ddp")], {}),  # has a bias of one element
    ],
)
def test_a_change_equals_one_device(model, named, more, ranks):
    finding = assert_equal(changing_case(model, *named, **more), ranks)
    assert finding.n_moved_bytes > 0


def test_a_view_has_the_fingerprint_of_its_copy():
    whole = torch.arange(6.0)
    assert _bits(whole[1:]) == _bits(whole[1:].clone()) != _bits(whole[:-1])


@pytest.mark.parametrize("index", [1, 7, 11])
def test_changes_between_random_strategies_equal_one_device(index, ranks):
    assert_equal(random_changing_case(0, index), ranks)


def test_a_slice_that_a_rank_keeps_gets_the_layout_that_the_others_receive(ranks):
    changing = changing_case("weight_views", (1, "single"), (2, "ddp"))  # has a transposed weight
    changes = [(at, replace(after, shard_state="gradients")) for at, after in changing.changes]
    assert_equal(replace(changing, changes=changes), ranks)


def next_by_search(graph, start, n_frozen, most_replicas):
    """The plan of the frozen model on three ranks with slow links, found as training finds it."""
    cluster = Cluster.uniform(3, 1, inside_bytes_per_s=1e6, memory_bytes=1 << 40)
    rates = {"device": DeviceRates(flops_per_s=1e7, memory_bytes_per_s=1e9)}
    profile = roofline_profile(graph, rates, n_parts=(1, 2, 3), n_microbatches=(1, 2, 3))
    options = SimulatorOptions(frozen=frozen_operators(graph, n_frozen))
    found = search_again(
        SearchAgain(
            graph=graph, cluster=cluster, profile=profile, options=options, batch=start.batch,
            budget=1000, start=start, most_replicas=most_replicas,
        )
    )  # fmt: skip
    assert found.strategy is not None, found.error
    return found.strategy


def test_freezing_shrinking_and_replicating_equal_one_device(ranks):
    """Links are slow, so a pipeline of three shrinks; at the end most of the model is frozen."""
    graph, start = small_graph("mlp"), strategies("mlp", 3, 6)["1f1b"]
    fewer, more = next_by_search(graph, start, 1, 1), next_by_search(graph, start, 2, None)
    used = [{d for own in one.stage_devices() for d in own} for one in (fewer, more)]
    assert [len(devices) for devices in used] == [1, 3]
    case = case_of("mlp", start, n_ranks=3, n_steps=6, optimizer="adamw", dropout="off")
    changes = [(1, start), (2, fewer), (4, more)]
    assert_equal(ChangingCase(case=case, changes=changes, frozen=[1, 1, 2]), ranks)


def test_only_slices_that_a_rank_lacks_travel(ranks):
    """Rank 1 gets the model and its momentum, which rank 0 keeps; nothing comes back."""
    changing = changing_case("mlp", (1, "single"), (2, "ddp"), (1, "single"), at=(1, 2))
    n_bytes = sum(p.numel() * 8 for p in changing.case.make_task().model.parameters())
    finding = assert_equal(changing, ranks)
    assert finding.n_moved_bytes == 2 * n_bytes


def test_a_change_that_fails_leaves_the_old_strategy(ranks):
    changing = changing_case("mlp", (2, "ddp"), (3, "ddp"))
    told = ranks.run(3, change_with_a_fault, changing)
    assert {said for _, said in told} == {
        "ranks 0 and 2 hold unequal state of the next strategy (the message from rank 0 to rank "
        "2): training goes on by the old one"
    }
    unchanged = ChangingCase(case=changing.case, changes=[])
    wanted = train_alone(unchanged)
    assert merged([trace for trace, _ in told]).losses == pytest.approx(wanted.losses, rel=1e-12)


def test_many_changes_leave_no_groups_files_or_memory(ranks):
    changing = changing_case("mlp", (3, "ddp"), (3, "1f1b"))
    for footprints in ranks.run(3, change_often, (changing, 16)):
        first, last = footprints[5], footprints[15]
        assert (first.n_groups, first.n_files) == (last.n_groups, last.n_files)
        assert last.rss_bytes - first.rss_bytes < 8 * MIB  # of malloc's own reserve


@pytest.mark.parametrize(
    ("model", "named", "more"),
    [
        ("mlp", [(3, "ddp"), (3, "ddp"), (2, "1f1b")], {"at": (1, 3), "frozen": (1, 2)}),
        ("vit", [(2, "1f1b"), (2, "tensor parallel")], {"frozen": (1,), "optimizer": "adamw"}),
        ("resnet18", [(2, "1f1b"), (2, "1f1b"), (2, "ddp")], {"at": (1, 3), "frozen": (3, 5)}),
        # The last change trains layers again, whose momentum then begins anew.
        (
            "lenet", [(3, "1f1b"), (3, "1f1b"), (2, "ddp")],
            {"at": (1, 3), "frozen": (3, 0), "optimizer": "adamw"},
        ),
        # The graph holds a copy of the module that writes in place.
        (
            "program gate 0, set_relu 3, prelu 3, add 4 5", [(1, "single"), (1, "single")],
            {"frozen": (1,)},
        ),
    ],
)  # fmt: skip
def test_frozen_layers_equal_one_device_that_freezes_them(model, named, more, ranks):
    assert_equal(changing_case(model, *named, **more), ranks)


def test_survivors_of_the_first_step_after_unfreezing_have_its_whole_state(ranks, tmp_path):
    """The layer that is trained again has no state of the optimizer yet."""
    changing = changing_case(
        "mlp", (2, "ddp"), (2, "ddp"), (2, "ddp"), at=(1, 2), frozen=(1, 0), optimizer="adamw"
    )
    ranks.run(2, survive_the_last_change, (changing, str(tmp_path)))
    state = load_sharded(tmp_path)
    assert state["step"] == 2
    n_parameters = len(list(changing.case.make_task().model.parameters()))
    assert 0 < len(state["optimizer"]["state"]) < n_parameters


@pytest.mark.parametrize("state", ["parameters_in_node", "gradients_in_node", "parameters"])
def test_without_a_rank_the_other_node_has_the_whole_state_that_is_sharded_in_nodes(
    state, ranks, tmp_path
):
    changing = changing_case("mlp", (4, "ddp"), (4, "ddp"), at=(2,), optimizer="adamw")
    changes = [(at, replace(s, shard_state=state)) for at, s in changing.changes]
    changing = replace(changing, changes=changes)
    ranks.run(4, survive_the_last_change, (changing, str(tmp_path)))
    if state == "parameters":
        with pytest.raises(ResultsError, match="only a lost rank had the others"):
            load_sharded(tmp_path)
    else:
        assert load_sharded(tmp_path)["step"] == 2


def test_frozen_layers_keep_their_bits_and_lose_gradients_and_optimizer_state(ranks):
    changing = changing_case("mlp", (2, "ddp"), (2, "ddp"), (2, "1f1b"), at=(2, 4), frozen=(1, 1))
    for found in ranks.run(2, freeze_and_count, changing):
        assert found.is_bit_equal
        assert found.freed_state_bytes == found.frozen_bytes  # momentum
        assert found.freed_bucket_bytes == found.frozen_bytes


def test_replicas_of_a_frozen_layer_have_the_statistics_of_rank_0(ranks):
    """Until then, each has those of its own samples."""
    changing = changing_case("resnet18", (2, "ddp"), (2, "ddp"), frozen=(3,), batch_norm="local")
    first, second = ranks.run(2, running_means, changing)
    assert first[True] == second[True] != []
    assert all(one != other for one, other in zip(first[False], second[False], strict=True))


def test_gradient_norms_of_layers_are_those_of_one_device(ranks):
    """Replicas, cut parameters and stages count once."""
    (wanted,) = ranks.run(1, layer_norms, changing_case("lenet", (1, "single"), at=()))
    assert min(wanted) > 0
    for name in ("ddp", "tensor parallel", "1f1b"):
        for found in ranks.run(3, layer_norms, changing_case("lenet", (3, name), at=())):
            assert found == pytest.approx(wanted, rel=1e-9), name


def piece(start, stop, name="w"):
    return WeightSlice(name, ((start, stop), (0, 2)))


def moved(before, after):
    """(start, stop, source, target) of each migration."""
    found = find_migrations(before, after)
    return [(*m.region.intervals[0], m.source, m.target) for m in found]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        # replicas: a rank keeps its own
        ({piece(0, 8): (0, 1)}, {piece(0, 8): (1,)}, [(0, 8, 1, 1)]),
        # a new replica
        ({piece(0, 8): (0,)}, {piece(0, 8): (0, 1)}, [(0, 8, 0, 0), (0, 8, 0, 1)]),
        # a cut that moves
        (
            {piece(0, 4): (0,), piece(4, 8): (1,)},
            {piece(0, 2): (0,), piece(2, 8): (1,)},
            [(0, 2, 0, 0), (2, 4, 0, 1), (4, 8, 1, 1)],
        ),
        # two holders share the sending
        (
            {piece(0, 8): (0, 1)},
            {piece(0, 4): (2,), piece(4, 8): (3,)},
            [(0, 4, 0, 2), (4, 8, 1, 3)],
        ),
    ],
)
def test_a_rank_gets_only_regions_that_it_lacks(before, after, wanted):
    assert moved(before, after) == wanted


def test_a_slice_that_nobody_holds_is_refused():
    with pytest.raises(StrategyError, match="needs 16 elements of w, the ranks hold 8 of them"):
        find_migrations({piece(0, 4): (0,)}, {piece(0, 8): (1,)})

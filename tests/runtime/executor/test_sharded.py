"""Sharded state: memory that each rank keeps, and refusals."""

import msgspec
import pytest
from equivalence_cases import Case
from equivalence_models import small_graph
from equivalence_ranks import local_world
from equivalence_sharded import kept_bytes, sharded
from equivalence_strategies import named_strategies
from equivalence_training import make_engine, train_in_fp16

from harness.domain.strategy import SHARD_STATES
from harness.errors import StrategyError
from harness.runtime.executor.geometry.slices import WeightSlice


@pytest.fixture
def case():
    strategy = named_strategies(small_graph("vit"), 2, 6)["ddp"]
    return Case(name="sharded", model="vit", n_ranks=2, strategy=strategy, seed=4)  # small units


def test_each_rank_keeps_half_of_what_is_sharded(case, ranks):
    whole = sum(8 * p.numel() for p in case.make_task().model.parameters())
    found = {state: ranks.run(2, kept_bytes, sharded(case, state)) for state in SHARD_STATES}
    shares = {
        state: [sum(column) / whole for column in list(zip(*kept, strict=True))[:3]]
        for state, kept in found.items()
    }
    # Of both ranks together; the buckets of unsharded gradients are kept for the next step. The
    # state is momenta and averages.
    assert shares == {
        "none": [2, 2, 4],
        "optimizer": [2, 2, 2],
        "gradients": [2, 1, 2],
        "parameters": [1, 1, 2],
    }
    for kept in found["parameters"]:
        assert kept.n_units > 6
        assert kept.most_units < 0.5 * whole
    sizes = [kept.weights for kept in found["parameters"]]
    assert max(sizes) < 0.55 * whole


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
    strategy = named_strategies(small_graph("hooked_weights"), 1, 6)["single"]
    case = Case(name="hooked", model="hooked_weights", n_ranks=1, strategy=strategy)
    make_engine(sharded(case, "optimizer"), case.make_task(), local_world(0, 1))
    with pytest.raises(StrategyError, match="has a hook on its whole gradient"):
        make_engine(sharded(case, "gradients"), case.make_task(), local_world(0, 1))

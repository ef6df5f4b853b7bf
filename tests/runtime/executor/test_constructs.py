"""What a model says beside its operators, and operators that share memory or give several values,
train as on one device under every strategy.
"""

from random import Random

import msgspec
import pytest
from equivalence_check import assert_equal
from equivalence_models import described, small_graph, small_task
from equivalence_named import assert_trained, case_of, make_case, pipeline_case
from equivalence_operators import OPERATORS
from equivalence_ranks import local_world
from equivalence_strategies import random_strategy
from equivalence_training import make_engine
from made_graphs import small_cluster

from harness.domain.strategy import OperatorPlan, validate
from harness.errors import ModelError, StrategyError
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.batch_norm import check_writers
from harness.runtime.executor.shards.forms import choose_forms

# Models of the zoo; operators of the second need all samples of a batch at once.
CONSTRUCTS = (
    "pair_function", "straight_through", "no_grad_branch", "hooked_weights", "complex_values",
    "placed_features",
)  # fmt: skip
MIXING = ("hooked_module", "buffer_assigned", "thirds_of_batch")
# hybrid plans each operator as one of these does.
WITHOUT_MICROBATCHES = ("ddp", "tensor parallel")


@pytest.mark.parametrize("name", [*WITHOUT_MICROBATCHES, "zero_bubble"])
@pytest.mark.parametrize("model", CONSTRUCTS)
def test_a_construct_trains_what_one_device_trains(model, name, ranks):
    assert_trained(make_case(model, name), ranks)


@pytest.mark.parametrize("model", MIXING)
def test_what_mixes_samples_is_trained_without_microbatches_alone(model, ranks):
    for name in WITHOUT_MICROBATCHES:
        assert_trained(make_case(model, name), ranks)
    case = make_case(model, "zero_bubble")
    with pytest.raises(StrategyError, match="needs all samples of a batch at once"):
        make_engine(case, local_world(0, 2))


# Others train the same under some strategies alone: where all operators of a norm are planned
# alike, where a module runs once a step, and without cuts of the batch.
ALIKE = sorted(OPERATORS.keys() - {"shared_norm", "spectral_norm", "fixed_batch"})
WITHOUT_SAMPLES = ("positions", "made_weights", "relative")  # some of their operators
SUITED = [
    *((model, name) for model in ALIKE for name in ("tensor parallel", "zero_bubble")),
    *(("shared_norm", name) for name in ("ddp", "single")),
    *(("spectral_norm", name) for name in ("single", "ddp", "tensor parallel")),
    ("fixed_batch", "single"),
]


@pytest.mark.parametrize(("model", "name"), SUITED)
def test_operators_train_what_one_device_trains(model, name, ranks):
    assert_equal(make_case(model, name), ranks)


@pytest.mark.parametrize(("seed", "model"), list(enumerate((*ALIKE, *WITHOUT_SAMPLES))))
def test_random_strategies_train_what_one_device_trains(seed, model, ranks):
    schedule = ("1f1b", "interleaved")[seed % 2]
    strategy = random_strategy(Random(seed), small_graph(model), 2, 8, schedule=schedule)
    assert_equal(case_of(model, strategy, name=f"random {seed}"), ranks)


@pytest.mark.parametrize("name", ["1f1b", "tensor parallel"])
def test_a_batch_norm_of_operators_that_are_planned_unalike_is_refused(name):
    strategy = make_case("shared_norm", name).strategy
    if name == "tensor parallel":
        plans = dict(strategy.operators)
        plans["norm"] = OperatorPlan({}, [1])
        strategy = msgspec.structs.replace(strategy, operators=plans)
    with pytest.raises(StrategyError, match=r"'norm' and '[^']*' call one batch norm"):
        validate(strategy, small_graph("shared_norm"), small_cluster(2))


@pytest.mark.parametrize(("name", "why"), [("gpipe", "4 microbatches"), ("recompute", "recomp")])
def test_a_module_that_changes_its_buffers_is_refused_where_it_runs_more_often(name, why):
    n_microbatches, recompute = (4, False) if name == "gpipe" else (1, True)
    case = pipeline_case("spectral_norm", 8, [[0], [1]], n_microbatches, recompute=recompute)
    with pytest.raises(StrategyError, match=f"'second' changes its buffer '[^']*' .*{why}"):
        check_writers(*described(small_task("spectral_norm"), 8), case.strategy)


def test_a_module_that_differentiates_in_its_forward_is_recomputed(ranks):
    assert_equal(pipeline_case("slopes", 8, [[0], [1]], 2, recompute=True), ranks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp", "is cut by samples, but the model takes batches of 8 samples alone"),
        ("gpipe", "operator view does not take a batch of 2 samples"),
    ],
)
def test_a_batch_size_that_is_written_out_is_refused_in_parts(name, message):
    strategy = make_case("fixed_batch", name).strategy
    sizes = sorted(set(strategy.microbatch_sizes()))
    with pytest.raises(ModelError, match=message):
        choose_forms(
            *described(small_task("fixed_batch"), 8), ExecutorPlan(strategy=strategy), sizes
        )

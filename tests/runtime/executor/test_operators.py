"""Operators that share memory, and that give several values, train as on one device."""

from random import Random

import msgspec
import pytest
import torch
from equivalence_cases import Case
from equivalence_check import check
from equivalence_models import small_graph, small_task
from equivalence_operators import OPERATORS
from equivalence_strategies import named_strategies, random_strategy, replicated_pipeline

from harness.domain.strategy import OperatorPlan
from harness.errors import ModelError, StrategyError
from harness.runtime.capture.capture import capture
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.batch_norm import check_shared_norms, check_writers
from harness.runtime.executor.shards.forms import choose_forms

ALIKE = sorted(OPERATORS.keys() - {"shared_norm", "spectral_norm", "fixed_batch"})
NAMES = ("ddp", "tensor parallel", "zero_bubble")


def assert_equal(model, strategy, ranks):
    case = Case(name=strategy.name, model=model, n_ranks=2, strategy=strategy)
    finding = check(case, ranks)
    assert finding.is_equal, finding.text()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ALIKE)
def test_operators_train_what_one_device_trains(model, name, ranks):
    assert_equal(model, named_strategies(small_graph(model), 2, 8)[name], ranks)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", ALIKE)
def test_random_strategies_train_what_one_device_trains(model, seed, ranks):
    schedule = ("1f1b", "interleaved")[seed]
    strategy = random_strategy(Random(seed), small_graph(model), 2, 8, schedule=schedule)
    assert_equal(model, msgspec.structs.replace(strategy, name=f"random {seed}"), ranks)


@pytest.mark.parametrize("name", ["ddp", "single"])
def test_a_batch_norm_of_several_operators_is_trained_where_all_are_planned_alike(name, ranks):
    assert_equal("shared_norm", named_strategies(small_graph("shared_norm"), 2, 8)[name], ranks)


@pytest.mark.parametrize("name", ["1f1b", "tensor parallel"])
def test_a_batch_norm_of_operators_that_are_planned_unalike_is_refused(name):
    strategy = named_strategies(small_graph("shared_norm"), 2, 8)[name]
    if name == "tensor parallel":
        plans = dict(strategy.operators)
        plans["norm"] = OperatorPlan({}, [1])
        strategy = msgspec.structs.replace(strategy, operators=plans)
    captured = capture(small_task("shared_norm"), 8, "model")
    with pytest.raises(StrategyError, match=r"'norm' and '[^']*' call one batch norm"):
        check_shared_norms(captured, strategy)


@pytest.mark.parametrize("name", ["single", "ddp", "tensor parallel"])
def test_a_module_that_changes_its_buffers_trains_where_it_runs_once_a_step(name, ranks):
    strategy = named_strategies(small_graph("spectral_norm"), 2, 8)[name]
    assert_equal("spectral_norm", strategy, ranks)


@pytest.mark.parametrize(("name", "why"), [("gpipe", "4 microbatches"), ("recompute", "recomp")])
def test_a_module_that_changes_its_buffers_is_refused_where_it_runs_more_often(name, why):
    task, graph = small_task("spectral_norm"), small_graph("spectral_norm")
    n_microbatches = 4 if name == "gpipe" else 1
    strategy = replicated_pipeline(
        graph, 8, [[0], [1]], n_microbatches=n_microbatches, recompute=name == "recompute"
    )
    captured = capture(task, 8, "model")
    meta = MetaModel(captured, task.inputs, torch.device("cpu"))
    with pytest.raises(StrategyError, match=f"'second' changes its buffer '[^']*' .*{why}"):
        check_writers(captured, meta, strategy)


def test_a_batch_size_that_is_written_out_is_trained_whole(ranks):
    strategy = named_strategies(small_graph("fixed_batch"), 2, 8)["single"]
    assert_equal("fixed_batch", strategy, ranks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp", "is cut by samples, but the model takes batches of 8 samples alone"),
        ("gpipe", "operator view does not take a batch of 2 samples"),
    ],
)
def test_a_batch_size_that_is_written_out_is_refused_in_parts(name, message):
    task = small_task("fixed_batch")
    strategy = named_strategies(small_graph("fixed_batch"), 2, 8)[name]
    captured = capture(task, 8, "model")
    meta = MetaModel(captured, task.inputs, torch.device("cpu"))
    sizes = sorted(set(strategy.microbatch_sizes()))
    with pytest.raises(ModelError, match=message):
        choose_forms(captured, meta, ExecutorPlan(strategy=strategy), sizes)

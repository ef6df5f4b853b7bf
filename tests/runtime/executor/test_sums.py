"""Partial sums that all holders want whole are one all_reduce, and train the same."""

import pytest
import torch
from equivalence_cases import Case
from equivalence_check import check
from equivalence_models import small_graph
from torch import nn

from harness.domain.partition import REPLICA, SAMPLE
from harness.domain.sharding import CONTRACTION, has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import StrategyError
from harness.runtime.capture.capture import capture
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.forms import choose_forms
from harness.runtime.models.task import InputSpec, Task

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
    captured = capture(task, BATCH, "scaled")
    *before, second, loss = [op.name for op in captured.graph.operators if has_tasks(op)]
    plans = {name: OperatorPlan({}, [0]) for name in (*before, loss)}
    plans[second] = OperatorPlan({REPLICA: 2}, [0, 1])
    plan = ExecutorPlan(strategy=Strategy(name="copies", batch=BATCH, operators=plans))
    meta = MetaModel(captured, task.inputs, torch.device("cpu"))
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
    strategy = by_sums(3, BATCH, n_microbatches, loss)
    case = Case(name="sums", model="towers", n_ranks=3, strategy=strategy)
    finding = check(case, ranks)
    assert finding.is_equal, finding.text()

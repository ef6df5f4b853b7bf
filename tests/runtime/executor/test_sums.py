"""Partial sums that all holders want whole are one all_reduce, and train the same."""

from __future__ import annotations

import pytest
import torch
from equivalence_check import check
from equivalence_models import small_graph, small_task
from equivalence_strategies import named_strategies
from equivalence_sums import SumsCase, by_sums, towers
from torch import nn

from harness.domain.partition import REPLICA, SAMPLE
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import StrategyError
from harness.runtime.capture.capture import capture
from harness.runtime.executor.geometry.layout import Layout
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.forms import choose_forms
from harness.runtime.executor.transport.messages import SharedSum, shared_sums
from harness.runtime.models.task import InputSpec, Task

BATCH = 6


def layout_of(strategy):
    task = towers()
    captured = capture(task, BATCH, "towers")
    return Layout(captured, MetaModel(captured, task.inputs, torch.device("cpu")), strategy, BATCH)


def test_a_sum_is_shared_where_all_holders_want_all_of_it():
    layout = layout_of(by_sums(3, BATCH))
    # The first narrow layer is read whole by the wide one after it, the last by samples.
    assert {layout.wants[number].value for number in shared_sums(layout)} == {"_2"}
    assert set(shared_sums(layout).values()) == {SharedSum((0, 1, 2), goes=True, returns=True)}
    assert {want.value for want in layout.wants if want.is_sum} == {"_2", "_5"}


def test_copies_share_the_sum_and_have_its_gradient():
    layout = layout_of(by_sums(3, BATCH, loss=REPLICA))
    sums = {layout.wants[number].value: one for number, one in shared_sums(layout).items()}
    assert sums["_5"] == SharedSum((0, 1, 2), goes=True, returns=False)
    assert [want.returns[0].part.device for want in layout.wants if want.value == "_5"] == [0, 1, 2]


def test_what_all_compute_is_read_without_a_word_and_has_all_gradients_summed():
    plans = named_strategies(small_graph("mlp"), 3, 12)["tensor parallel"]
    task = small_task("mlp", seed=0, dtype=torch.float64, has_dropout=False)
    captured = capture(task, 12, "mlp")
    layout = Layout(captured, MetaModel(captured, task.inputs, torch.device("cpu")), plans, 12)
    (read,) = {
        one for number, one in shared_sums(layout).items()
        if layout.wants[number].value == "layers_5"
    }  # fmt: skip
    assert read == SharedSum((0, 1, 2), goes=False, returns=True)


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


def test_two_devices_exchange_their_sums():
    assert shared_sums(layout_of(by_sums(2, BATCH))) == {}


@pytest.mark.parametrize("n_microbatches", [1, 2])
@pytest.mark.parametrize("loss", [SAMPLE, REPLICA])
def test_shared_sums_train_what_one_device_trains(n_microbatches, loss, ranks):
    strategy = by_sums(3, BATCH, n_microbatches, loss=loss)
    case = SumsCase(name="sums", model="towers", n_ranks=3, strategy=strategy)
    finding = check(case, ranks)
    assert finding.is_equal, finding.text()

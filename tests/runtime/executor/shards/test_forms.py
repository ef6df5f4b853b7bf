"""What the executor cannot compute block by block is refused by name, and no search plans it."""

import pytest
import torch
import torch.nn.functional as F
from equivalence_models import described
from torch import nn

from harness.domain.cluster import Cluster
from harness.domain.strategy import OperatorPlan
from harness.errors import ModelError
from harness.plan.builders import ddp, tensor_parallel
from harness.plan.costs import PlanRequest
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.plan.portfolio import search_portfolio
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.forms import choose_forms
from harness.runtime.models import build_task, fit_options
from harness.runtime.models.task import InputSpec, ModelOptions, Task, TextOptions

PAIR = Cluster.uniform(1, 2, kind="rank", memory_bytes=1, inside_bytes_per_s=1.0)


class Calling(nn.Module):
    """A linear layer and a function."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def forms_of(function, others=None, **plan):
    """The forms of a data parallel plan on two devices, but for `others`."""
    spec = InputSpec(name="x", shape=(6,))
    task = Task(model=Calling(function), inputs=(spec,), n_classes=6)
    captured, meta = described(task, 4)
    strategy = ddp(captured.graph, PAIR, 4)
    strategy.operators.update(others or {})
    return choose_forms(captured, meta, ExecutorPlan(strategy=strategy, **plan), [4])[4].of


@pytest.mark.parametrize(
    "function",
    [nn.AlphaDropout(0.1), nn.RReLU(), lambda x: F.feature_alpha_dropout(x, 0.1, True),
     torch.rand_like],
)  # fmt: skip
def test_exact_dropout_refuses_what_draws_in_another_way(function):
    with pytest.raises(ModelError, match=r"draws random numbers, which exact dropout and copies"):
        forms_of(function, dropout="exact")
    assert "native" in forms_of(function).values()


def test_exact_dropout_takes_a_functions_dropout():
    assert forms_of(lambda x: torch.dropout(x, 0.1, True), dropout="exact")["dropout"] == "dropout"


@pytest.mark.parametrize(("training", "batch_norm"), [(True, "local"), (False, "global")])
def test_a_functions_batch_norm_is_computed_as_it_is(training, batch_norm):
    forms = forms_of(lambda x: _norm(x, training), batch_norm=batch_norm)
    assert forms["batch_norm"] == "native"


def test_global_statistics_of_a_functions_batch_norm_are_refused():
    with pytest.raises(ModelError, match="'batch_norm' is a batch norm by a function"):
        forms_of(lambda x: _norm(x, True), batch_norm="global")
    others = {"batch_norm": OperatorPlan({"feature": 2}, [0, 1])}
    forms = forms_of(lambda x: _norm(x, True), others, batch_norm="global")
    assert forms["batch_norm"] != "collective"


@pytest.mark.parametrize("batch_norm", ["local", "global"])
def test_a_norm_that_meets_all_ranks_by_itself_is_refused(batch_norm):
    with pytest.raises(ModelError, match=r"'function' \(SyncBatchNorm\).*global batch norm"):
        forms_of(nn.SyncBatchNorm(6), batch_norm=batch_norm)


def test_global_statistics_of_volumes_are_those_of_all_blocks():
    volumes = nn.Sequential(nn.Unflatten(1, (2, 3, 1, 1)), nn.BatchNorm3d(2), nn.Flatten())
    assert forms_of(volumes, batch_norm="local")["function.1"] == "native"
    assert forms_of(volumes, batch_norm="global")["function.1"] == "collective"
    assert forms_of(volumes.eval(), batch_norm="global")["function.1"] == "native"


def _norm(x, training):
    return F.batch_norm(x, torch.zeros(6), torch.ones(6), training=training)


class Tied(nn.Module):
    """Predicts tokens by the rows of its embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(24, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.relu(self.table(x)))


def test_a_table_that_is_tied_to_the_output_is_cut_by_its_rows():
    spec = InputSpec(name="x", shape=(6,), dtype=torch.int64, n_values=24)
    captured, meta = described(Task(model=Tied(), inputs=(spec,), n_classes=24), 4)
    strategy = tensor_parallel(captured.graph, PAIR, 4)
    assert strategy.operators["table"].partition == {"contraction": 2}
    forms = choose_forms(captured, meta, ExecutorPlan(strategy=strategy), [4])[4].of
    assert "gathered" not in forms.values()


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "dlrm"])
def test_what_searches_cut_is_not_computed_whole(name):
    sizes = TextOptions(sequence_length=16, vocabulary_size=120, n_layers=1, width=64, n_heads=4)
    asked = ModelOptions(dropout=0.0, text=sizes) if name != "dlrm" else ModelOptions()
    task = build_task(name, fit_options(name, asked), seed=1)
    captured, meta = described(task, 8)
    rates = {"rank": DeviceRates(flops_per_s=2e11, memory_bytes_per_s=1e10)}
    cluster = Cluster.uniform(1, 2, kind="rank", memory_bytes=1 << 36, inside_bytes_per_s=1e10)
    profile = roofline_profile(captured.graph, rates, n_parts=(1, 2), n_microbatches=(1, 2))
    found = search_portfolio(
        PlanRequest(graph=captured.graph, profile=profile, cluster=cluster, batch=8, budget=200)
    )
    for candidate in found.ranked():
        plan = ExecutorPlan(strategy=found.strategy(candidate))
        for forms in choose_forms(captured, meta, plan, plan.strategy.microbatch_sizes()).values():
            assert "gathered" not in forms.of.values(), candidate.method

"""Graphs say what the models are: parameters, FLOPs, branches, shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.errors import ModelError
from harness.runtime.capture import capture, capture_model, trace
from harness.runtime.models import (
    MODELS,
    DlrmOptions,
    InputSpec,
    ModelOptions,
    Task,
    build_task,
    fit_options,
)

OPTIONS = ModelOptions(dlrm=DlrmOptions(table_rows=(100,) * 8))


def meta_task(name):
    with torch.device("meta"):
        return build_task(name, fit_options(name, OPTIONS))


def whole_flops(task, batch):
    """Forward plus backward of the whole model, counted at once."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        inputs = [torch.zeros(batch, *spec.shape, dtype=spec.dtype) for spec in task.inputs]
        task.model(*inputs).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_flops_and_parameters_are_the_models_own(name):
    task = meta_task(name)
    graph = capture_model(name, 4, OPTIONS)
    flops = sum(o.forward_flops + o.backward_flops for o in graph.operators)
    assert flops == whole_flops(task, 4)
    assert graph.parameter_bytes == 4 * sum(p.numel() for p in task.model.parameters())
    assert graph.operators[-1].kind == "loss"
    assert all(o.kind != "other" or o.attrs["function"] for o in graph.operators)


def test_the_same_model_gives_the_same_graph():
    assert capture_model("resnet18", 4) == capture_model("resnet18", 4)


def test_frozen_statistics_are_told_apart():
    by_batch, frozen = (
        capture_model("resnet18", 4, ModelOptions(has_frozen_norms=is_frozen)).operators
        for is_frozen in (False, True)
    )
    changed = {a.kind for a, b in zip(by_batch, frozen, strict=True) if a != b}
    assert changed == {"batch_norm"}
    norms = [operator for operator in frozen if operator.kind == "batch_norm"]
    assert {norm.attrs["statistics"] for norm in norms} == {"frozen"}
    assert all("frozen" in norm.profile_key for norm in norms)


@pytest.mark.parametrize("is_training", [True, False])
def test_frozen_statistics_of_a_function_are_told_too(is_training):
    class Normalised(nn.Module):
        def forward(self, images):
            mean, variance = torch.zeros(3), torch.ones(3)
            return F.batch_norm(images, mean, variance, training=is_training).flatten(1)

    task = Task(
        model=Normalised(),
        inputs=(InputSpec(name="images", shape=(3, 4, 4)),),
        loss="cross_entropy",
        n_classes=48,
    )
    (norm,) = (o for o in capture(task, 4, "normalised").graph.operators if o.kind == "batch_norm")
    assert ("statistics" in norm.attrs) != is_training


def test_a_residual_block_keeps_its_branches():
    graph = capture_model("resnet18", 2)
    add = next(o for o in graph.operators if o.kind == "add")
    assert len(set(add.inputs)) == 2
    pool = next(o for o in graph.operators if o.name == "maxpool")
    assert pool.attrs["kernel"] == [3, 3]
    assert [i for i, c in enumerate(graph.consumers()) if len(c) == 2]


def test_tables_and_mlps_of_dlrm_meet_in_one_cat():
    graph = capture_model("dlrm", 4, OPTIONS)
    (cat,) = [o for o in graph.operators if o.kind == "cat"]
    assert len(cat.inputs) == 9
    assert cat.shape == {"sample": 4, "feature": 576}
    assert sum(o.kind == "embedding" for o in graph.operators) == 8


def test_attention_is_one_operator_that_reads_its_input_three_times():
    graph = capture_model("vit_b_16", 2)
    attention = next(o for o in graph.operators if o.kind == "attention")
    assert attention.attrs["n_heads"] == 12
    assert len(attention.inputs) == 3
    assert len(set(attention.inputs)) == 1


class Twice(nn.Module):
    """Uses one weight in two places."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(torch.relu(self.linear(x)))


def test_a_shared_weight_is_counted_once_and_named_twice():
    task = Task(model=Twice(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4)
    graph = capture(task, 2, "twice").graph
    linears = [o for o in graph.operators if o.kind == "linear"]
    assert [o.parameter_bytes for o in linears] == [80, 0]
    assert {o.attrs["module"] for o in linears} == {"linear"}


class Looping(nn.Module):
    """Control flow over a tensor's rows, which symbolic tracing cannot follow."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(torch.stack([row * 2 for row in x.unbind(1)], dim=1))


def test_what_fx_cannot_trace_is_exported():
    task = Task(model=Looping(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4)
    graph = capture(task, 2, "looping").graph
    assert graph.parameter_bytes == 80
    assert sum(o.kind == "linear" for o in graph.operators) == 1


def test_a_model_is_exported_on_the_device_that_it_is_on():
    model = Looping().to("meta")
    task = Task(model=model, inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4)
    assert capture(task, 2, "looping").module.linear.weight.device.type == "meta"


class ByRows(nn.Module):
    """A loop over samples, which exporting unrolls."""

    def forward(self, x):
        return torch.stack([row * 2 for row in x.unbind(0)])


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_an_exported_model_takes_batches_of_any_size(batch):
    module = trace(Looping(), (torch.ones(batch, 4),))
    assert [module(torch.ones(n, 4)).shape[0] for n in (1, 3, 12)] == [1, 3, 12]


@pytest.mark.parametrize("batch", [1, 6])
def test_a_model_that_exporting_ties_to_a_batch_size_is_refused(batch):
    task = Task(model=ByRows(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4)
    with pytest.raises(ModelError, match="exported for one batch size only: its input 'x'"):
        capture(task, batch, "rows")


class Selecting(nn.Module):
    def forward(self, x):
        return x[torch.nonzero(x)]


def test_an_operator_without_a_shape_is_named_with_its_model():
    task = Task(model=Selecting(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4)
    message = r"^selecting cannot be captured \(NotImplementedError: .*nonzero.*--engine torch"
    with pytest.raises(ModelError, match=message):
        capture(task, 2, "selecting")


class Deciding(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


def test_what_neither_can_follow_is_refused_with_both_reasons():
    with pytest.raises(ModelError, match=r"torch\.fx .* nor by torch\.export"):
        trace(Deciding(), (torch.ones(2, 2),))

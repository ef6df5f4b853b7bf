"""Graphs say what the models are: parameters, FLOPs, branches, shapes."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from nets import Net, held, task_on
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.errors import ModelError
from harness.runtime.capture.capture import capture, capture_model, trace
from harness.runtime.models import MODELS, build_task, fit_options
from harness.runtime.models.task import DlrmOptions, InputSpec, ModelOptions, Task, TextOptions
from harness.runtime.tracing.export import export
from harness.runtime.tracing.refusals import refusal

OPTIONS = ModelOptions(
    dlrm=DlrmOptions(table_rows=(100,) * 8),
    text=TextOptions(sequence_length=6, vocabulary_size=30, n_layers=1, width=16, n_heads=4),
)


def meta_task(name):
    with torch.device("meta"):
        return build_task(name, fit_options(name, OPTIONS))


@cache
def graph_of(name, has_frozen_norms=False):
    return capture_model(name, 4, replace(OPTIONS, has_frozen_norms=has_frozen_norms))


def whole_flops(task, batch):
    """Forward plus backward of the whole model, counted at once."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        inputs = [torch.zeros(batch, *spec.shape, dtype=spec.dtype) for spec in task.inputs]
        task.model(*inputs).sum().backward()
    return counter.get_total_flops()


# Deep models take seconds each; resnet18 and inception_v3 have all of their operators.
DEEP = {"resnet50", "resnet101", "resnet152", "densenet121"}


@pytest.mark.parametrize("name", sorted(MODELS.keys() - DEEP))
def test_flops_and_parameters_are_the_models_own(name):
    task = meta_task(name)
    graph = graph_of(name)
    flops = sum(o.forward_flops + o.backward_flops for o in graph.operators)
    assert flops == whole_flops(task, 4)
    assert graph.parameter_bytes == 4 * sum(p.numel() for p in task.model.parameters())
    assert graph.operators[-1].kind == "loss"
    assert all(o.kind != "other" or o.attrs["function"] for o in graph.operators)


def test_frozen_statistics_are_told_apart():
    by_batch, frozen = (graph_of("resnet18", is_frozen).operators for is_frozen in (False, True))
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

    operators = capture(task_on(Normalised(), 3, 4, 4), 4, "normalised").graph.operators
    (norm,) = (o for o in operators if o.kind == "batch_norm")
    assert ("statistics" in norm.attrs) != is_training


def test_a_residual_block_keeps_its_branches():
    graph = graph_of("resnet18")
    add = next(o for o in graph.operators if o.kind == "add")
    assert len(set(add.inputs)) == 2
    pool = next(o for o in graph.operators if o.name == "maxpool")
    assert pool.attrs["kernel"] == [3, 3]
    assert [i for i, c in enumerate(graph.consumers()) if len(c) == 2]


def test_attention_is_one_operator_that_reads_its_input_three_times():
    graph = graph_of("vit_b_16")
    attention = next(o for o in graph.operators if o.kind == "attention")
    assert attention.attrs["n_heads"] == 12
    assert len(attention.inputs) == 3
    assert len(set(attention.inputs)) == 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Twice(Layer):
    """Uses one weight in two places."""

    def forward(self, x):
        return self.linear(torch.relu(self.linear(x)))


def test_a_shared_weight_is_counted_once_and_named_twice():
    graph = capture(task_on(Twice()), 2, "twice").graph
    linears = [o for o in graph.operators if o.kind == "linear"]
    assert [o.parameter_bytes for o in linears] == [80, 0]
    assert {o.attrs["module"] for o in linears} == {"linear"}


class Looping(Layer):
    """Control flow over a tensor's rows, which symbolic tracing cannot follow."""

    def forward(self, x):
        return self.linear(torch.stack([row * 2 for row in x.unbind(1)], dim=1))


def test_frozen_weights_are_told_and_their_times_are_their_own():
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    trained = capture(
        Task(model=net, inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4), 2, ""
    )
    assert len({op.signature for op in trained.graph.operators[1:5]}) == 1
    net[:2].requires_grad_(False)
    net[3].weight.requires_grad_(False)
    found = capture(Task(model=net, inputs=(InputSpec(name="x", shape=(4,)),), n_classes=4), 2, "")
    linears = found.graph.operators[1:5]
    assert [op.trained_share for op in linears] == [0, 0, 1, 4 / 20]
    assert [op.signature == linears[0].signature for op in linears] == [True, True, False, False]


class Unread(Layer):
    """Computes a second result, which the loss does not read."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        return {"logits": self.linear(x), "other": self.other(self.linear(x))}


def test_results_that_the_loss_does_not_read_have_no_backward():
    graph = capture(task_on(Unread()), 2, "unread").graph
    linears = [o for o in graph.operators if o.kind == "linear"]
    assert [o.forward_flops for o in linears] == [64.0] * 3
    assert [o.backward_flops for o in linears] == [64.0, 0.0, 0.0]
    assert linears[0].signature not in {o.signature for o in linears[1:]}
    assert [o.trained_share for o in linears] == [1.0, 1.0, 0.0]


def test_what_fx_cannot_trace_is_exported():
    graph = capture(task_on(Looping()), 2, "looping").graph
    assert graph.parameter_bytes == 80
    assert sum(o.kind == "linear" for o in graph.operators) == 1
    on_meta = capture(task_on(Looping().to("meta")), 2, "looping").module
    assert on_meta.linear.weight.is_meta


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
    with pytest.raises(ModelError, match="ByRows cannot be captured: forward loops"):
        capture(task_on(ByRows()), batch, "rows")


class Selecting(nn.Module):
    def forward(self, x):
        return x[torch.nonzero(x)]


def test_an_operator_without_a_shape_is_named_with_its_model():
    line = Selecting.forward.__code__.co_firstlineno + 1
    place = rf"\(test_capture.py:{line} in forward\)"
    message = rf"^Selecting cannot be captured: the shape of .* {place}: .*--engine torch"
    with pytest.raises(ModelError, match=message):
        capture(task_on(Selecting()), 2, "selecting")


class OnTheCpu(nn.Module):
    """Kept whole for its hook; makes tensors where PyTorch does by default."""

    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(lambda *_: None)

    def forward(self, x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4)


def by_value(net, x):
    return x if x.sum() > 0 else -x


def of_a_slope(net, x):
    return torch.autograd.grad(x.tanh().sum(), x, create_graph=True)[0]


def of_a_function(net, x):
    return x * torch.func.grad(lambda bias: (bias**3).sum())(net.first.bias)


def of_a_pass(net, x):
    x.sum().backward(retain_graph=True)
    return x


def of_lengths(net, x):
    classes = torch.ones(len(x), 2, dtype=torch.int64)
    lengths = classes.sum(1)
    return x * nn.functional.ctc_loss(
        x.log_softmax(-1).expand(2, -1, -1), classes, lengths, lengths
    )


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (of_lengths, "forward computes a CTC loss .*: return the mean"),
        (by_value, "forward decides by the values of a tensor"),
        (of_a_slope, r"forward calls torch\.autograd\.grad, which differentiates"),
        (of_a_function, r"forward differentiates by torch\.func"),
        (of_a_pass, r"forward calls backward\(\), which differentiates"),
        (lambda net, x: torch.stack([row + 1 for row in x]), "forward loops over the samples"),
        (lambda net, x: sum(x[i] for i in range(x.shape[0])), "forward takes a size of a tensor"),
        (lambda net, x: torch.from_numpy(x.detach().numpy()), "forward computes by numpy"),
        (lambda net, x: x * x.max().item(), "forward reads the value of a tensor"),
        (
            lambda net, x: x @ torch.cov(x.T),
            "forward asks whether two tensors are equal, as torch.cov",
        ),
        (
            lambda net, x: x + torch.istft(torch.stft(x, 4, return_complex=True), 4).mean(),
            "forward asks whether two tensors are equal, as .* istft",
        ),
        (lambda net, x: x + torch.unique(x).sum(), "the shape of a tensor depends on values"),
        (lambda net, x: x.reshape(7, -1), "RuntimeError: shape .* is invalid"),
        (lambda net, x: {"a": x}["b"], "KeyError: 'b'"),
    ],
)
def test_a_refusal_is_one_short_line_with_construct_place_and_remedy(middle, words):
    with pytest.raises(ModelError, match=rf"cannot be captured: .*{words}") as refused:
        capture(task_on(Net(middle)), 6, "construct")
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 300
    assert re.search(r"\((test_capture|nets)\.py:\d+ in |\(operator '", message)
    assert message.endswith(
        "or train it by PyTorch alone (train --engine torch), which needs no plan"
    )


def test_a_refusal_names_the_line_that_fixes_the_number_of_samples():
    def of_six(net, x):
        return x * len(range(x.shape[0]))

    with pytest.raises(ModelError) as fixed:
        export(Net(of_six), (torch.zeros(6, 4),))
    with pytest.raises(KeyError) as other:
        {}["of torch.fx"]
    words = r"forward takes 6 samples as a fixed number.*\(test_capture.py:\d+ in of_six\)"
    assert re.search(words, str(refusal("Net", other.value, fixed.value.with_traceback(None))))


class Unmasked(Layer):
    """Fails while it is exported, beside a construct that an export can follow."""

    def forward(self, x):
        if torch.zeros(len(x), 1).any():
            return x
        return self.linear(x).reshape(-1, 4 + torch.compiler.is_exporting())


def test_a_refusal_names_the_error_of_a_module_that_would_be_kept_whole():
    model = nn.Sequential(nn.Linear(4, 4), Unmasked())
    words = r"RuntimeError: .*\(test_capture.py:\d+ in forward\)"
    with pytest.raises(ModelError, match=f"Sequential cannot be captured: {words}"):
        capture(task_on(model), 6, "unmasked")


def test_a_refusal_names_a_hook_that_uses_a_weight_of_another_module():
    net = Net(lambda net, x: x.tanh())
    net.first.register_forward_hook(lambda *of_first: of_first[2] + net.last.weight.sum())
    with pytest.raises(ModelError, match="or a hook uses a tensor of another module"):
        capture(task_on(net), 6, "hooked")


def test_detection_of_anomalies_is_off_during_capture():
    with torch.autograd.set_detect_anomaly(True):
        captured = capture(task_on(nn.Linear(4, 4)), 6, "linear")
        assert torch.is_anomaly_enabled()
    assert len(captured.graph.operators) == 3


def test_weights_without_a_shape_are_refused_by_their_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ModelError, match=r"^module '1' \(LazyLinear\) has no weights before"):
        capture(task_on(model), 6, "lazy")


def _two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Reading(nn.Linear):
    """Also reads a tensor that is not its parameter."""

    def __init__(self, make):
        super().__init__(4, 4)
        self.other = make(self.weight)

    def forward(self, x):
        return super().forward(x) @ self.other


def _share_parameter(model):
    model[2].weight = nn.Parameter(model[0].weight)


def _share_transposed(model):
    model[2].weight.data = model[0].weight.data.t()


def _share_rows(model):
    whole = torch.randn(6, 4)
    model[0].weight, model[2].weight = nn.Parameter(whole[:4]), nn.Parameter(whole[2:])


@pytest.mark.parametrize("share", [_share_parameter, _share_transposed, _share_rows])
def test_two_weights_that_share_memory_are_refused(share):
    model = _two_linears()
    share(model)
    with pytest.raises(ModelError, match=r"^weights '0.weight' and '2.weight' share memory but"):
        capture(task_on(model), 6, "shared")


def test_weights_beside_each_other_in_memory_are_captured():
    model, whole = _two_linears(), torch.randn(4, 8)
    model[0].weight, model[2].weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])
    assert capture(task_on(model), 6, "columns").graph.operators


def test_an_attribute_that_is_a_view_of_a_trained_weight_is_refused():
    with pytest.raises(ModelError, match=r"^weights 'weight' and 'other' share memory but"):
        capture(task_on(Reading(lambda weight: weight.detach())), 6, "view")


def test_a_weight_whose_elements_share_memory_is_refused():
    model = _two_linears()
    model[0].bias = nn.Parameter(torch.zeros(1).expand(4))
    with pytest.raises(ModelError, match=r"^elements of weight '0.bias' share memory"):
        capture(task_on(model), 6, "expanded")


class Loose(Layer):
    """Takes whatever it is given."""

    def forward(self, *tensors, scale=2.0, **others):
        return self.linear(sum(tensors)) * scale * len(tensors) + len(others)


@pytest.mark.parametrize("n_inputs", [1, 2])
def test_arguments_without_names_are_what_is_fed(n_inputs):
    model = Loose()
    inputs = tuple(InputSpec(name=f"x{n}", shape=(4,)) for n in range(n_inputs))
    found = capture(Task(model=model, inputs=inputs, n_classes=4), 6, "loose")
    batch = [torch.rand(3, 4) for _ in range(n_inputs)]
    assert torch.equal(found.module(*batch), model(*batch))


def test_tensors_that_a_whole_module_makes_are_of_no_device_while_it_is_captured():
    held(task_on(nn.Sequential(nn.Linear(4, 4), OnTheCpu())))


def test_unknown_functions_are_named_in_one_line_with_their_flops_if_they_have_any(caplog):
    model = nn.Sequential(nn.LocalResponseNorm(2), nn.Flatten(), nn.Linear(48, 5))
    capture(task_on(model, 3, 4, 4), 2, "model")
    assert not caplog.records
    model = nn.Sequential(
        nn.LocalResponseNorm(2), nn.ConvTranspose2d(3, 4, 2, 2), nn.Flatten(), nn.Linear(256, 5)
    )
    capture(task_on(model, 3, 4, 4), 2, "model")
    n_flops = 2 * 2 * 4 * 4 * 3 * 4 * 2 * 2
    (record,) = caplog.records
    names = "ConvTranspose2d (1), LocalResponseNorm (0)"
    assert f"does not know {names}: operators with {n_flops:.3g} of" in record.getMessage()


@pytest.mark.parametrize("cast", ["float", "double", "half", "bfloat16", "long", "int", "bool"])
def test_casts_are_elementwise(cast):
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(getattr(x, cast)().to(x.dtype))

    graph = capture(task_on(Casting(), 4), 2, "model").graph
    kinds = {op.attrs.get("function"): op.kind for op in graph.operators}
    assert kinds[cast] == "elementwise"


def test_no_sample_affects_what_is_made_of_an_element_of_several_values():
    def middle(net, x):
        first, second = net.last.weight.tanh().split((1, 2))
        return x * (first.sum() + second.sum())

    graph = capture(task_on(Net(middle)), 8, "net").graph
    assert [op.name for op in graph.operators if not op.reads_samples] == [
        "tanh", "split", "sum_1", "sum_2", "add",
    ]  # fmt: skip


ROWS = torch.tensor([0, 2, 2])


@pytest.mark.parametrize("name", ["T", "mT", "index"])
@pytest.mark.parametrize("is_exported", [False, True])
def test_no_sample_affects_a_view_or_some_rows_of_a_weight(name, is_exported):
    def middle(net, x):
        if is_exported:  # as in Looping
            x = torch.stack([*x.unbind(1)], dim=1)
        weight = net.last.weight
        return x * weight[ROWS].sum() if name == "index" else x @ getattr(weight, name) @ weight

    graph = capture(task_on(Net(middle)), 8, "net").graph
    made = [op.attrs["function"] for op in graph.operators if not op.reads_samples]
    in_export = {"T": ["numpy_T"], "mT": ["mT"], "index": ["index", "sum"]}
    by_fx = {"T": ["getattr"], "mT": ["getattr"], "index": ["getitem", "sum"]}
    assert made == (in_export if is_exported else by_fx)[name]

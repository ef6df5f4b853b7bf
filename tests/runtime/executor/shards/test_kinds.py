import operator
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from equivalence_attentions import N_TOKENS, SHAPE, Reader, Stacked
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from harness.domain.partition import blocks
from harness.domain.sharding import cuttable_dims, full_shape, input_block
from harness.errors import StrategyError
from harness.runtime.capture.capture import capture
from harness.runtime.executor.shards.base import ShardSpec, Wanted
from harness.runtime.executor.shards.kinds import make_shard
from harness.runtime.models.task import InputSpec, Task

# Sums of up to a few hundred terms of size 1, in another order, in float64.
TOLERANCE = 1e-12


class Call(nn.Module):
    """Calls a module or a function with its inputs, and with its parameters after these."""

    def __init__(self, called, *parameters, **options):
        super().__init__()
        self.called, self.options = called, options
        for k, shape in enumerate(parameters):
            self.register_parameter(f"p{k}", nn.Parameter(torch.randn(shape)))
        self.n = len(parameters)

    def forward(self, x):
        own = [getattr(self, f"p{k}") for k in range(self.n)]
        return self.called(x, *own, **self.options)


class Pair(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


class Attention(nn.Module):
    """Attends from an input to itself, or to a second one."""

    def __init__(self, is_self=True, **options):
        super().__init__()
        self.is_self = is_self
        self.call = options.pop("call", {"need_weights": False})
        self.attention = nn.MultiheadAttention(8, 4, **{"batch_first": True, **options})
        for parameter in self.attention.parameters():
            nn.init.normal_(parameter)

    def forward(self, x, y):
        if self.is_self:
            return self.attention(x, x, x, **self.call)[0]
        output, _ = self.attention(x, y, y, **self.call)
        return output


def captured(model, inputs):
    """The model's one operator: Captured, the operator, and the inputs in float64."""
    specs = tuple(
        InputSpec(name=f"input{k}", shape=tuple(x.shape[1:]), dtype=x.dtype)
        for k, x in enumerate(inputs)
    )
    model = model.double()
    found = capture(Task(model=model, inputs=specs), inputs[0].shape[0], "one")
    (name,) = found.nodes
    return found, found.graph.operators[found.graph.index()[name]]


@dataclass
class Assembled:
    output: torch.Tensor
    of_inputs: list
    of_weights: dict


def as_inputs(inputs):
    return [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]


def run_whole(found, inputs, gradient):
    leaves = as_inputs([x.clone() for x in inputs])
    # Copies, because functions in place refuse leaves.
    output = found.module(*(x.clone() for x in leaves))
    output.backward(gradient)
    weights = {name: p.grad for name, p in found.module.named_parameters()}
    found.module.zero_grad()
    return Assembled(output.detach(), [x.grad for x in leaves], weights)


def shards_of(found, op, inputs, cuts):
    """(block, wanted, shard) of each part; a producer's dims are those of the graph's inputs."""
    graph = found.graph
    shape = full_shape(op, batch=graph.batch, graph_batch=graph.batch)
    shapes = [graph.operators[graph.index()[name]].shape for name in op.inputs]
    for block in blocks(list(shape), list(shape.values()), cuts):
        wanted = [
            Wanted(producer, input_block(op, shape, block, producer, argument=k))
            for k, producer in enumerate(shapes)
        ]
        part = ShardSpec(
            operator=op, node=found.nodes[op.name], root=found.module, shape=shape, block=block,
            wanted=wanted,
        )  # fmt: skip
        yield block[: len(op.shape)], wanted, make_shard(part)


def run_parts(found, op, inputs, cuts, gradient):
    """Every part by itself, put together: partial sums and gradients add up."""
    given = dict(zip([o.name for o in found.graph.operators], inputs, strict=False))
    sums = {name: torch.zeros_like(x) for name, x in given.items() if x.is_floating_point()}
    whole = {n: torch.zeros_like(p) for n, p in found.module.named_parameters()}
    output = torch.zeros_like(gradient)
    for block, wanted, shard in shards_of(found, op, inputs, cuts):
        assert shard is not None
        at = tuple(slice(*i) for i in block)
        places = [tuple(slice(*i) for i in each.block) for each in wanted]
        pieces = as_inputs(
            [given[n][p].detach().clone() for n, p in zip(op.inputs, places, strict=True)]
        )
        part = shard(*pieces)
        assert part.shape == gradient[at].shape
        output[at] += part.detach()
        part.backward(gradient[at])
        for name, place, piece in zip(op.inputs, places, pieces, strict=True):
            if piece.grad is not None:
                sums[name][place] += piece.grad
        for name, parameter in shard.named_parameters():
            source = shard.sources[name]
            assert torch.equal(source.take(found.module.get_parameter(source.name)), parameter)
            source.take(whole[source.name]).add_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    names = [o.name for o in found.graph.operators]
    of_inputs = [sums.get(name) for name in names[: len(inputs)]]
    return Assembled(output, of_inputs, whole)


def check(model, inputs, cuts):
    torch.manual_seed(7)
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    found, op = captured(model, inputs)
    with torch.no_grad():
        gradient = torch.randn_like(found.module(*[x.clone() for x in inputs]))
    whole = run_whole(found, inputs, gradient)
    parts = run_parts(found, op, inputs, cuts, gradient)
    assert (parts.output - whole.output).abs().max() <= TOLERANCE
    for k, (a, b) in enumerate(zip(parts.of_inputs, whole.of_inputs, strict=True)):
        if b is not None:
            assert (a - b).abs().max() <= TOLERANCE, f"gradient of input {k}"
    for name, gradient in whole.of_weights.items():
        if gradient is not None:
            error = (parts.of_weights[name] - gradient).abs().max()
            assert error <= TOLERANCE, f"gradient of {name}"


def images(channels=4, height=11, width=9, n=3):
    return [torch.randn(n, channels, height, width)]


def tokens(n=3, t=5, c=8):
    return [torch.randn(n, t, c)]


def conv(**options):
    return Call(nn.Conv2d(4, 6, **{"kernel_size": 3, **options}))


# Whatever other tests of this process have drawn, the cases are the same.
torch.manual_seed(0)
LINEAR = [
    (Call(nn.Linear(8, 7)), [torch.randn(5, 8)], {"feature": 3}),
    (Call(nn.Linear(8, 7, bias=False)), [torch.randn(5, 8)], {"feature": [1, 4]}),
    (Call(nn.Linear(8, 7)), tokens(), {"feature": [1, 2, 1]}),
    (Call(nn.Linear(8, 7)), tokens(), {"seq": [1, 3]}),
    (Call(nn.Linear(8, 7)), tokens(), {"seq": 2, "feature": 3}),
    (Call(nn.Linear(8, 7)), tokens(), {"sample": 2, "seq": 2, "feature": 2}),
    (Call(nn.Linear(8, 7)), [torch.randn(5, 8)], {"contraction": 3}),
    (Call(nn.Linear(8, 7)), tokens(), {"contraction": [1, 2], "feature": 2}),
    (Call(nn.Linear(8, 7)), tokens(), {"contraction": 2, "seq": 2, "sample": 2}),
    (Call(F.linear, (7, 8), (7,)), tokens(), {"seq": 2, "feature": 3}),
]
CONV = [
    (conv(), images(), {"feature": [1, 2, 1]}),
    (conv(padding=1), images(), {"height": 3}),
    (conv(padding=1), images(), {"height": [1, 5]}),
    (conv(padding=(2, 0), stride=(2, 1)), images(), {"height": 3}),
    (conv(padding=(0, 2), stride=(1, 3)), images(), {"width": 2}),
    (conv(padding=2, dilation=2), images(), {"height": 2, "width": 2}),
    (conv(padding=1, stride=2), images(), {"height": 2, "feature": 2}),
    (conv(padding=1, bias=False), images(), {"sample": [1, 2], "width": [2, 1], "feature": 3}),
    (conv(groups=2, padding=1), images(), {"feature": 2}),
    (conv(groups=2, padding=1), images(), {"feature": 6, "height": 2}),
    (conv(groups=2, padding=1), images(), {"feature": [4, 2]}),
    (conv(groups=2, padding=1), images(), {"feature": [2, 4], "width": 2}),
    (Call(nn.Conv2d(6, 6, 3, groups=6, padding=1)), images(6), {"feature": 2, "height": 3}),
    (Call(nn.Conv2d(6, 12, 3, groups=3)), images(6), {"feature": [3, 8, 1]}),
    (conv(kernel_size=1, stride=2), images(), {"height": 3}),
    (conv(kernel_size=1, stride=2), images(4, 10, 8), {"feature": 3}),
    (conv(stride=3, padding=2), images(4, 11, 9), {"height": 3}),
    (conv(kernel_size=1, padding=2), images(2 * 2, 3, 3), {"height": 7}),
    (conv(kernel_size=(1, 5), padding=(0, 2)), images(), {"height": 2, "width": 3}),
    (conv(padding=1), images(4, 5, 9), {"height": 5}),
    (Call(F.conv2d, (6, 4, 3, 3), (6,), padding=1), images(), {"feature": 2}),
]
POOL = [
    (Call(nn.MaxPool2d(2)), images(), {"feature": 3}),
    (Call(nn.MaxPool2d(2)), images(), {"height": 2}),
    (Call(nn.MaxPool2d(3, 2, 1)), images(), {"height": 3}),
    (Call(nn.MaxPool2d(3, 2, 1)), images(), {"width": 2, "height": [1, 2]}),
    (Call(nn.MaxPool2d(3, 2, ceil_mode=True)), images(4, 10, 9), {"height": 2}),
    (Call(nn.MaxPool2d(3, 2, 1, ceil_mode=True)), images(4, 10, 10), {"height": 3, "width": 3}),
    (Call(nn.MaxPool2d(3, 2, 1, ceil_mode=True)), images(4, 10, 10), {"feature": 2, "sample": 3}),
    (Call(nn.AvgPool2d(3, 2, 1)), images(), {"height": 3}),
    (Call(nn.AvgPool2d(3, 2, 1, count_include_pad=False)), images(), {"height": 3, "width": 2}),
    (Call(nn.AvgPool2d(3, 2, 1, ceil_mode=True)), images(4, 10, 10), {"height": 3, "width": 2}),
    (
        Call(nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
        images(4, 10, 10),
        {"height": 2, "width": 3},
    ),
    (Call(nn.AvgPool2d(3, 2, 1, divisor_override=5)), images(), {"height": 2, "width": 2}),
    (Call(nn.AvgPool2d((2, 3))), images(), {"feature": 2, "width": 3}),
    (Call(nn.AdaptiveAvgPool2d((3, 2))), images(), {"feature": 2}),
    (Call(nn.AdaptiveMaxPool2d(3)), images(), {"feature": [1, 3], "sample": 2}),
    (Call(F.max_pool2d, kernel_size=3, stride=2), images(), {"feature": 2}),
    (Call(F.avg_pool2d, kernel_size=3, padding=1), images(), {"feature": 2}),
    (Call(F.adaptive_avg_pool2d, output_size=(2, 3)), images(), {"feature": 2}),
]
LAYER_NORM = [
    (Call(nn.LayerNorm(8)), tokens(), {"seq": [1, 3]}),
    (Call(nn.LayerNorm(8, bias=False)), tokens(), {"seq": 2, "sample": 2}),
    (Call(nn.LayerNorm(9, elementwise_affine=False)), images(), {"height": 3}),
    (Call(nn.LayerNorm((11, 9))), images(), {"feature": 3}),
    (Call(lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-3), (8,), (8,)), tokens(), {"seq": 2}),
]
POINTWISE = [
    (Call(nn.ReLU(inplace=True)), images(), {"height": 2, "width": [1, 2], "feature": 3}),
    (Call(nn.GELU()), tokens(), {"seq": 2, "feature": 2}),
    (Call(nn.LeakyReLU(0.3, True)), tokens(), {"feature": [1, 3]}),
    (Call(F.relu, inplace=True), tokens(), {"feature": 2}),
    (Call(lambda x: F.relu(x, True)), tokens(), {"feature": 2}),
    (Call(torch.tanh), tokens(), {"feature": 2}),
    (Call(lambda x: x.clamp(-0.5, max=0.5)), tokens(), {"seq": 2, "feature": 2}),
    (Call(lambda x: 2 - x), tokens(), {"seq": 3}),
    (Call(lambda x: x.mul(x)), tokens(), {"seq": 3}),
    (Call(operator.add, (1, 5, 8)), tokens(), {"seq": 2, "feature": 3}),
    (Call(operator.add, (5, 8)), tokens(), {"seq": 2, "sample": 3}),
    (Call(operator.mul, (4, 1, 1)), images(), {"feature": [1, 2], "height": 2}),
    (Call(operator.mul, ()), images(), {"feature": 2}),
    (Pair(operator.add), [*tokens(), *tokens()], {"seq": 2, "feature": 3}),
    (Pair(lambda x, y: torch.add(x, y, alpha=2)), [*tokens(), *tokens()], {"seq": 2}),
    (Pair(lambda x, y: torch.add(y, x, alpha=2)), [*tokens(), *tokens()], {"feature": 2}),
    (Pair(operator.mul), [*images(), *images(4, 1, 1)], {"feature": 2, "height": 3}),
    (Pair(operator.mul), [*images(), *images(1, 11, 9)], {"feature": 2, "width": 2}),
    (Pair(operator.isub), [*tokens(), *tokens()], {"seq": 2}),
]
EMBEDDING = [
    (Call(nn.Embedding(10, 7)), [torch.arange(15).view(3, 5) % 10], {"feature": 3}),
    (Call(nn.Embedding(10, 7, padding_idx=3)), [torch.arange(15).view(3, 5) % 10], {"feature": 2}),
    (Call(nn.Embedding(10, 7)), [torch.arange(15).view(3, 5) % 10], {"seq": [1, 3], "feature": 2}),
    (Call(nn.EmbeddingBag(10, 7, mode="sum")), [torch.arange(15).view(3, 5) % 10], {"feature": 2}),
    (
        Call(nn.EmbeddingBag(10, 7, mode="mean", padding_idx=2)),
        [torch.arange(15).view(3, 5) % 10],
        {"feature": [1, 5], "sample": 2},
    ),
]
TAKE = "ntec,ntd->necd"
INTO = "necd,edh->nech"
STACK = [torch.randn(3, 4, 5, 8)]
EINSUM = [
    (Pair(lambda x, y: torch.einsum(TAKE, x, y)), [*STACK, *tokens(3, 4)], {"feature": [1, 4]}),
    (Pair(lambda x, y: torch.einsum(TAKE, x, y)), [*STACK, *tokens(3, 4)], {"contraction": 2}),
    (
        Pair(lambda x, y: torch.einsum("ntec,necd->ntd", x, y)),
        [*STACK, torch.randn(3, 5, 8, 6)],
        {"sample": 3, "contraction": [2, 3], "seq": 2, "feature": 2},
    ),
    (Call(lambda x, w: torch.einsum(INTO, x, w), (4, 8, 6)), STACK, {"feature": [1, 3]}),
    (Call(lambda x, w: torch.einsum(INTO, x, w), (4, 8, 6)), STACK, {"width": 3, "height": 2}),
    (Call(lambda x, w: torch.einsum(INTO, (x, w)), (4, 8, 6)), STACK, {"contraction": [1, 3]}),
    (Call(operator.matmul, (4, 8, 6)), STACK, {"feature": 2, "contraction": 2, "sample": 3}),
]
TWO = [*tokens(), *tokens(t=6)]
ATTENTION = [
    (Attention(), TWO, {"heads": 4}),
    (Attention(), TWO, {"heads": [1, 3]}),
    (Attention(), TWO, {"seq": [1, 3]}),
    (Attention(), TWO, {"seq": 2, "heads": 2}),
    (Attention(), TWO, {"seq": 2, "heads": 2, "sample": 3}),
    (Attention(bias=False), TWO, {"heads": 2}),
    (Attention(is_self=False), TWO, {"seq": 2, "heads": 2}),
    (Attention(call={}), TWO, {"heads": 2}),
    (Attention(False, kdim=6, vdim=6), [*tokens(), *tokens(t=6, c=6)], {"seq": 2, "heads": 2}),
]


@pytest.mark.parametrize(
    "case", [*LINEAR, *CONV, *POOL, *LAYER_NORM, *POINTWISE, *EMBEDDING, *EINSUM, *ATTENTION],
    ids=lambda case: f"{type(case[0]).__name__} {case[2]}",
)  # fmt: skip
def test_parts_put_together_are_the_whole(case):
    check(*case)


class Positions(nn.Module):
    """Adds a table's rows for the positions, which are constant."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


def test_a_table_is_cut_where_its_indices_are_constant():
    task = Task(model=Positions(), inputs=(InputSpec(name="x", shape=(5, 8)),))
    found = capture(task, 3, "positions")
    (table,) = (op for op in found.graph.operators if op.kind == "embedding")
    whole = found.module.table(torch.arange(5))
    parts = list(shards_of(found, table, [], {"seq": [2, 3], "feature": 2}))
    output = torch.zeros_like(whole)
    for block, _, shard in parts:
        output[tuple(slice(*interval) for interval in block)] += shard()
    assert len(parts) == 4
    assert torch.equal(output, whole)


CHOICES = st.integers(0, 2**32)


def random_cut(rng, size):
    """Up to four parts of a dim, uneven as often as not."""
    n = rng.randint(1, min(4, size))
    return n if rng.random() < 0.5 else [rng.randint(1, 2) for _ in range(n)]


def is_possible(op, shape, cuts):
    try:
        list(blocks(list(shape), list(shape.values()), cuts))
    except StrategyError:
        return False
    return set(cuts) <= set(cuttable_dims(op, shape))


@given(CHOICES)
@settings(max_examples=12, derandomize=True)
def test_any_window_and_any_cut_put_together_are_the_whole(seed):
    rng = random.Random(seed)
    kernel = rng.randint(1, 4), rng.randint(1, 4)
    stride = rng.randint(1, 3), rng.randint(1, 3)
    x = images(4, rng.randint(7, 11), rng.randint(7, 11), n=2)
    if rng.random() < 0.5:
        padding = rng.randint(0, 3), rng.randint(0, 3)
        dilation, groups = rng.randint(1, 2), rng.choice([1, 2, 4])
        options = {"padding": padding, "dilation": dilation, "groups": groups}
        model = Call(nn.Conv2d(4, 8, kernel, stride, **options))
    else:
        padding = rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2)
        is_ceil = rng.random() < 0.5
        if rng.random() < 0.5:
            model = Call(nn.MaxPool2d(kernel, stride, padding, ceil_mode=is_ceil))
        else:
            is_counted = rng.random() < 0.5
            model = Call(nn.AvgPool2d(kernel, stride, padding, is_ceil, is_counted))
    _, op = captured(model, [x[0].double()])
    dims = rng.sample(sorted(op.shape), rng.randint(1, 3))
    cuts = {dim: random_cut(rng, op.shape[dim]) for dim in dims}
    assume(is_possible(op, op.shape, cuts))
    check(model, x, cuts)


@pytest.mark.parametrize(
    ("model", "inputs", "dim"),
    [
        (Call(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), images(), "height"),
        (Call(nn.Conv2d(4, 6, 3, padding="same")), images(), "height"),
        (Call(nn.GroupNorm(2, 4)), images(), "height"),
        (Call(nn.LayerNorm(8)), tokens(), "feature"),
        (Call(nn.Embedding(9, 8, max_norm=1.0)), [torch.ones(3, 5).long()], "feature"),
        (Call(nn.Dropout2d(0.5)), images(), "width"),
        (Call(nn.Softmax(-1)), tokens(), "seq"),
        (Call(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))), tokens(), "feature"),
        (Attention(batch_first=False), TWO, "heads"),
        (Attention(add_zero_attn=True), TWO, "heads"),
        (Attention(call={"attn_mask": torch.zeros(5, 5).double()}), TWO, "heads"),
    ],
)
def test_what_cannot_be_cut_exactly_has_no_shard(model, inputs, dim):
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    found, op = captured(model, inputs)
    assert all(shard is None for _, _, shard in shards_of(found, op, inputs, {dim: 2}))


def test_constants_of_an_attention_are_tensors_of_the_model():
    inputs = (InputSpec(name="x", shape=SHAPE, dtype=torch.int64, n_values=N_TOKENS),)
    found = capture(Task(model=Reader(Stacked), inputs=inputs), 2, "stacked")
    (op,) = (op for op in found.graph.operators if op.kind == "attention")
    for *_, shard in shards_of(found, op, (), {"heads": 2}):
        assert "attentions.0.slopes" in {source.name for source in shard.sources.values()}


@pytest.mark.parametrize(
    ("called", "inputs", "cuts"),
    [
        (nn.Linear(8, 7), tokens(), {"feature": 2, "seq": 2}),
        (nn.Conv2d(4, 6, 3, padding=1), images(), {"feature": 2}),
        (nn.ReLU(inplace=True), images(), {"feature": 2, "height": 3}),
        (nn.MaxPool2d(3, 2, 1), images(), {"feature": 2}),
        (nn.LayerNorm(8), tokens(), {"seq": 2}),
        (lambda x: x.add_(x), tokens(), {"seq": 2}),
    ],
)
def test_exported_functions_are_cut_as_modules_are(called, inputs, cuts, monkeypatch):
    def refuse(model):
        raise NotImplementedError("as for control flow that depends on values")

    monkeypatch.setattr(torch.fx, "symbolic_trace", refuse)
    check(Call(called), inputs, cuts)

"""Whether functions of a user's, and attentions under masks, mix the samples of a batch."""

import pytest
import torch
from made_graphs import replicated_pipeline
from nets import by_closure, function, graph_of, hooked, task_on
from torch import fx, nn

from harness.domain.strategy import check_microbatches
from harness.errors import StrategyError
from harness.runtime.capture.capture import capture

# The gradient of a sample is that of another.
Flipped = function("Flipped", lambda ctx, x: x * 1, lambda ctx, grad: grad.flip(0))


def counted(net, x):
    calls = []
    x.register_hook(lambda grad: calls.append(1) or grad * len(calls))
    return x


@pytest.mark.parametrize(
    ("middle", "name", "is_mixing"),
    [
        (by_closure, "scaled", False),
        (lambda net, x: Flipped.apply(x), "flipped", True),
        (hooked, "register_hook", False),
        (lambda net, x: x.register_hook(lambda g: g / g.norm()) and x, "register_hook", True),
        (counted, "register_hook", True),
    ],
)
def test_what_mixes_samples_is_found_out(middle, name, is_mixing):
    (operator,) = (op for op in graph_of(middle).operators if op.name == name)
    assert operator.attrs.get("mixes_samples", False) == is_mixing
    assert operator.attrs.get("is_cut_by_samples", True) != is_mixing


def test_what_mixes_samples_refuses_microbatches():
    graph = graph_of(lambda net, x: Flipped.apply(x))
    strategy = replicated_pipeline(graph, 4, [[0], [1]], n_microbatches=2)
    with pytest.raises(StrategyError, match=r"'flipped' \(Flipped\) needs all samples .* 2 micro"):
        check_microbatches(strategy, graph)


def by_export(net, x):
    return x if x.sum(1).shape[0] < 0 else Flipped.apply(x)  # torch.fx cannot follow it


def test_names_do_not_depend_on_earlier_captures():
    assert [op.name for op in graph_of(by_export).operators] == [
        op.name for op in graph_of(by_export).operators
    ]


def centred(ctx, x):
    return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize("name", ["relu", "dropout", "view", "add"])
def test_a_function_of_a_users_is_what_it_does_whatever_its_name(name):
    own = function(name, centred, centred)  # cannot be cut in any way, as operators of the name can
    (operator,) = (
        op for op in graph_of(lambda net, x: own.apply(x)).operators if op.name not in
        ("x", "first", "last", "loss")
    )  # fmt: skip
    assert operator.kind == "other"
    assert operator.attrs["is_repeatable"] is False


@fx.wrap
def clip(x):
    return x / x.norm()


@fx.wrap
def linear(x):
    return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("middle", "name", "is_mixing"),
    [(lambda net, x: clip(x), "clip", True), (lambda net, x: linear(x), "linear", False)],
)
def test_a_wrapped_function_of_a_users_is_what_it_does_whatever_its_name(middle, name, is_mixing):
    (operator,) = (op for op in graph_of(middle).operators if op.name == name)
    assert (operator.kind, operator.attrs["function"]) == ("other", f"{__name__}.{name}")
    assert operator.attrs.get("mixes_samples", False) == is_mixing
    assert operator.attrs["is_repeatable"] is False


def multiply(ctx, x, factor):
    ctx.factor = factor
    return x * factor


def times_factor(ctx, grad):
    return grad * ctx.factor, None


def multiply_by_weight(ctx, x, weight):
    ctx.save_for_backward(weight)
    return x * weight


def with_sign(ctx, grad):
    (weight,) = ctx.saved_tensors
    return grad * weight, weight.sign()


Multiplied = function("Multiplied", multiply, times_factor)
# Another function of one sample than of several.
UnlikeAlone = function(
    "UnlikeAlone", lambda ctx, x, n: multiply(ctx, x, n if len(x) > 1 else 1), times_factor
)
# A weight's gradient that does not add up over samples.
SignedWeight = function("SignedWeight", multiply_by_weight, with_sign)
# NaN of random values, whatever they are divided by.
Logarithm = function(
    "Logarithm", lambda ctx, x: (x / x.abs().mean() - 9).log(), lambda ctx, grad: grad
)


@pytest.mark.parametrize(
    ("middle", "is_mixing"),
    [
        (lambda net, x: Multiplied.apply(x, x.shape[1]), False),
        (lambda net, x: Multiplied.apply(x, x.shape[0]), True),
        (lambda net, x: UnlikeAlone.apply(x, 2), True),
        (lambda net, x: SignedWeight.apply(x, net.last.bias[0]), True),
        (lambda net, x: Logarithm.apply(x), True),
    ],
)
def test_a_users_function_keeps_samples_apart_for_any_number_of_them(middle, is_mixing):
    (operator,) = (
        op for op in graph_of(middle).operators if op.attrs.get("is_repeatable") is False
    )
    assert operator.attrs.get("mixes_samples", False) == is_mixing


class Attending(nn.Module):
    """PyTorch's attention and decoder under masks that forward makes."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 3, batch_first=True)
        layer = nn.TransformerDecoderLayer(6, 3, 8, dropout=0.0, batch_first=True)
        self.decode = nn.TransformerDecoder(layer, 1)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        mask = torch.full((x.size(1), x.size(1)), float("-inf"), device=x.device).triu(1)
        y, _ = self.attend(x, x, x, attn_mask=mask.to(x.dtype), key_padding_mask=x[..., 0] > 2)
        return self.last(self.decode(y, x, tgt_mask=mask))


def test_attentions_under_masks_mix_no_samples():
    operators = capture(task_on(Attending(), 5, 6), 4, "attending").graph.operators
    assert len(operators) > 30
    assert not [op.name for op in operators if op.attrs.get("mixes_samples")]

"""What an operator gives must be finite, or on the way to a loss that is."""

from contextlib import nullcontext
from operator import attrgetter

import pytest
import torch
from nets import Call, Heads, task_on
from torch import nn
from torch.nn import functional as F

from harness.errors import VerificationError
from harness.runtime.capture.capture import capture
from harness.runtime.profiling.shards import operator_shard, verify
from harness.runtime.profiling.subgraph import OperatorCall
from harness.runtime.tracing.attention_region import AttentionRegion


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.called = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x):
        return self.called(x, x, x, need_weights=False)[0]


def call_part(model, x, dim, size, n_arguments=1):
    """The whole module, and the call of a part of it on (n, ...) inputs."""
    found = capture(task_on(model, *x.shape[1:], dtype=x.dtype), x.shape[0], "one")
    whole = found.module.get_submodule("called")
    leaf = x.detach().requires_grad_(x.is_floating_point())
    call = OperatorCall(whole, (leaf,) * n_arguments, {}, tuple(whole.parameters()))
    shard = operator_shard(found, "called", dim, size, call)
    return whole, None if shard is None else shard.call(call)


@pytest.mark.parametrize(
    ("whole", "x"),
    [
        (nn.Linear(6, 8), torch.randn(2, 6)),
        (nn.Conv2d(4, 8, 3, stride=2, padding=1), torch.randn(2, 4, 9, 9)),
        (nn.Conv2d(4, 8, 3, groups=2), torch.randn(2, 4, 9, 9)),
        (nn.Embedding(10, 8), torch.arange(10).view(2, 5)),
        (nn.EmbeddingBag(10, 8, mode="sum"), torch.arange(10).view(2, 5)),
    ],
)
def test_a_part_computes_the_last_of_the_output_features(whole, x):
    x = x.double() if x.is_floating_point() else x
    module, part = call_part(Call(whole).double(), x, "feature", 3)
    dim = 1 if isinstance(whole, nn.Conv2d) else -1
    # Sums of up to 36 terms of size 1, in another order.
    assert (part.function(*part.args) - module(x).narrow(dim, 5, 3)).abs().max() < 1e-13
    assert {p.dtype for p in part.parameters} == {torch.float64}


class Function(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def test_a_part_of_a_function_has_its_slices_of_the_weights():
    model, x = Function().double(), torch.randn(2, 6, dtype=torch.float64)
    found = capture(task_on(model, 6, dtype=x.dtype), 2, "one")
    call = OperatorCall(F.linear, (x, *model.parameters()), {}, tuple(model.parameters()))
    part = operator_shard(found, "linear", "feature", 3, call).call(call)
    assert (part.function(*part.args) - model(x)[:, 5:]).abs().max() < 1e-13  # sums of 6 terms
    assert [tuple(p.shape) for p in part.parameters] == [(3, 6), (3,)]


def test_a_part_of_the_contraction_has_no_bias_and_input_features_of_its_own():
    linear, part = call_part(Call(nn.Linear(6, 4)), torch.randn(2, 6), "contraction", 2)
    assert [tuple(p.shape) for p in part.parameters] == [(4, 2)]
    assert torch.equal(part.parameters[0], linear.weight[:, 4:])
    assert part.args[0].shape == (2, 2)
    assert part.args[0].is_contiguous()
    assert part.args[0].is_leaf


def test_one_of_four_heads_has_a_quarter_of_the_weights_and_reads_its_input_once():
    whole, part = call_part(SelfAttention(), torch.randn(2, 5, 8), "heads", 1, n_arguments=3)
    n_weights = sum(p.numel() for p in part.parameters if p.dim() == 2)
    assert n_weights * 4 == whole.in_proj_weight.numel() + whole.out_proj.weight.numel()
    assert len({id(x) for x in part.args}) == 1


@pytest.mark.parametrize(
    ("whole", "x", "dim"),
    [
        (nn.Linear(4, 4), torch.ones(2, 4), "heads"),
        (nn.Conv2d(4, 8, 3), torch.ones(2, 4, 9, 9), "contraction"),
        (nn.Embedding(9, 8, max_norm=1.0), torch.ones(2, 5).long(), "feature"),
    ],
)
def test_what_cannot_be_cut_has_no_part(whole, x, dim):
    assert call_part(Call(whole), x, dim, 2)[1] is None


def test_saved_bytes_are_the_inputs_and_not_the_parameters_and_finite_values_are_not_asked_about():
    linear = nn.Linear(10, 3)
    x = torch.ones(4, 10, requires_grad=True)
    call = OperatorCall(linear, (x,), {}, tuple(linear.parameters()))
    assert verify(call, "linear", nullcontext, lambda: pytest.fail("asked")) == 4 * 10 * 4


@pytest.mark.parametrize(
    ("function", "value", "kind"), [(torch.log, 0.0, "output"), (torch.sqrt, 0.0, "gradient")]
)
def test_other_values_are_wrong_unless_the_loss_is_finite(function, value, kind):
    x = torch.full((4,), value, requires_grad=True)
    with pytest.raises(VerificationError, match=f"operator 'f' gives {kind}s that are not finite"):
        verify(OperatorCall(function, (x,), {}), "operator 'f'", nullcontext)
    verify(OperatorCall(function, (x,), {}), "operator 'f'", nullcontext, lambda: True)


def test_two_heads_of_an_exported_attention_have_half_of_its_weights():
    found = capture(task_on(Heads(4), 5, 8), 2, "one")
    ((name, node),) = (
        (k, n) for k, n in found.nodes.items() if isinstance(n.target, AttentionRegion)
    )
    weights = [attrgetter(str(held.target))(found.module) for held in node.args[1:]]
    call = OperatorCall(node.target, (torch.randn(2, 5, 8), *weights), {}, ())
    whole, half = (operator_shard(found, name, "heads", n, call).call(call) for n in (4, 2))
    torch.testing.assert_close(whole(), call())
    n_each = [sum(p.numel() for p in part.parameters if p.dim() == 2) for part in (whole, half)]
    assert n_each == [4 * 64, 2 * 64]

"""Casts to another tensor's dtype, and random draws in it, follow the dtype of the training."""

from contextlib import nullcontext

import pytest
import torch
from nets import Net, task_on

from harness.runtime.capture.capture import capture
from harness.runtime.tracing.training_dtype import DtypeCast


def exported(x):
    """A loop that torch.fx cannot trace."""
    return torch.stack([2 * column for column in x.unbind(1)], dim=1)


def cast_back(net, x):
    x = exported(x)
    return (x.float() / 7).to(x.dtype).sin()


def cast_where_dtypes_differ(net, x):
    """As LoRA does."""
    x, weight = exported(x), net.last.weight
    wide = x if x.dtype == weight.dtype else x.to(weight.dtype)
    return (wide / 7).to(dtype=x.dtype).sin()


def cast_in_a_region(net, x):
    x = exported(x)
    with torch.no_grad():
        scale = (x.float() / 7).to(x.dtype)
    return x * scale.sin()


def leave_autocast(net, x):
    """As routers of transformers do."""
    x, is_enabled = exported(x), torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False) if is_enabled else nullcontext():
        scale = net.first(x.float())
    return scale.to(x.dtype).sin()


def cast_by_name_too(net, x):
    x = exported(x)
    return (x.to(torch.bfloat16).float() / 7).to(x.dtype).sin()


def branch(net, x):
    x = cast_back(net, x)
    return x.clamp(max=0.1) if x.dtype == torch.bfloat16 else x


def gradients(model, net, x, dtype):
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        model(x).to(x.dtype).square().sum().backward()
    return [model.get_parameter(name).grad.clone() for name, _ in net.named_parameters()]


def drop_samples(net, x):
    """As layers of stochastic depth do."""
    x = exported(x)
    drawn = torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)
    return x * torch.floor(0.5 + drawn)


def mask(net, x):
    scores = exported(x)
    return scores.masked_fill(scores > 0, torch.finfo(scores.dtype).min).softmax(1)


def traced_cast(net, x):
    return (x.float() / 7).to(x.dtype).sin() + (x.float() / 3).type(x.dtype)


def traced_draw(net, x):
    drawn = torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)
    return x * torch.floor(0.5 + drawn)


MIDDLES = [
    cast_back, cast_where_dtypes_differ, cast_in_a_region, leave_autocast, cast_by_name_too,
    drop_samples, mask, traced_cast, traced_draw,
]  # fmt: skip


def assert_equal(net, graph, x, dtype=None):
    pairs = zip(gradients(net, net, x, dtype), gradients(graph, net, x, dtype), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("middle", MIDDLES)
def test_a_cast_follows_autocast(middle):
    torch.manual_seed(0)
    net, x = Net(middle), torch.randn(6, 4)
    graph = capture(task_on(net), 6, "net").module
    for dtype in (None, torch.bfloat16, torch.float16):
        assert_equal(net, graph, x, dtype)


@pytest.mark.parametrize("between", [exported, torch.tanh])
def test_a_cast_stays_where_autocast_is_another_on_gpus(between):
    def of_a_norm(net, x):
        normed = torch.nn.functional.layer_norm(between(x), (4,))
        return (normed.float() / 7).to(normed.dtype)

    module = capture(task_on(Net(of_a_norm)), 6, "net").module
    assert not any(isinstance(node.target, DtypeCast) for node in module.graph.nodes)


def test_a_model_that_autocast_cannot_run_is_captured_for_fp32():
    def of_complex_values(net, x):
        x = cast_back(net, x)
        return torch.complex(x, x).abs()

    net, x = Net(of_complex_values), torch.randn(6, 4)
    with pytest.raises(RuntimeError, match="BFloat16"), torch.autocast("cpu", torch.bfloat16):
        net(x)
    assert_equal(net, capture(task_on(net), 6, "net").module, x)


def test_a_cast_to_a_weights_dtype_follows_the_weights():
    torch.manual_seed(0)
    net, x = Net(cast_where_dtypes_differ), torch.randn(6, 4)
    graph = capture(task_on(net), 6, "net").module
    assert_equal(net.double(), graph.double(), x.double())


def test_a_cast_to_16_bits_of_the_model_stays():
    def of_a_weight(net, x):
        return (torch.tanh(x).float() / 7).to(net.last.weight.dtype)

    torch.manual_seed(0)
    net, x = Net(of_a_weight).bfloat16(), torch.randn(6, 4, dtype=torch.bfloat16)
    assert_equal(net, capture(task_on(net, dtype=torch.bfloat16), 6, "net").module, x)


def test_a_model_that_differs_in_more_than_casts_keeps_its_graph_in_fp32():
    torch.manual_seed(0)
    net, x = Net(branch), torch.randn(6, 4)
    captured = capture(task_on(net), 6, "net")
    assert not any("clamp" in op.name for op in captured.graph.operators)
    assert_equal(net, captured.module, x)

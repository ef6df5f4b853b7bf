"""Parts of a model under autocast keep their dtypes."""

import pytest
import torch
from nets import Net, task_on

from harness.runtime.capture.capture import capture


def autocast(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net.first(x)
        y = torch.softmax(y @ net.last.weight.t() @ net.last.weight, dim=1) * net.first(y).tanh()
        with torch.autocast("cpu", enabled=False):
            y = net.first(y.float())
        a, b = y.exp().chunk(2, dim=1)
    return torch.cat([b, a], dim=1).float() + x


def autocast_off_on_its_device(net, x):
    """As the rotary embeddings of language models do."""
    with torch.autocast(device_type=x.device.type, enabled=False):
        return net.first(x.float()).sin()


def autocast_in_a_loop(net, x):
    x = torch.stack([2 * column for column in x.unbind(1)], dim=1)
    return autocast(net, x)


@pytest.mark.parametrize("middle", [autocast, autocast_in_a_loop, autocast_off_on_its_device])
def test_a_part_under_autocast_computes_in_its_own_dtypes(middle):
    torch.manual_seed(0)
    model, x = Net(middle), torch.randn(6, 4)
    captured = capture(task_on(model), 6, "net")

    def gradients_of(each, dtype):
        each.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            each(x).float().square().sum().backward()
        return {name: each.get_parameter(name).grad.clone() for name, _ in model.named_parameters()}

    for dtype in (None, torch.bfloat16):  # of the rest of the model
        wanted, found = gradients_of(model, dtype), gradients_of(captured.module, dtype)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_flops_under_autocast_count_once():
    graph = capture(task_on(Net(autocast_off_on_its_device)), 6, "net").graph
    counts = {op.name: op.forward_flops for op in graph.operators if op.forward_flops}
    assert counts == {"first": 192, "first_autocast_off": 192, "last": 2 * 6 * 4 * 3}


def test_dtypes_under_autocast_are_known_before_anything_is_computed():
    captured = capture(task_on(Net(autocast)), 4, "net")
    graph = captured.graph
    known = {op.name: op.dtype for op in graph.operators}
    run = torch.fx.Interpreter(captured.module, garbage_collect_values=False)
    run.run(torch.randn(4, 4))
    real = {name: run.env[node] for name, node in captured.nodes.items()}
    dtypes = {n: str(x.dtype).split(".")[1] for n, x in real.items() if isinstance(x, torch.Tensor)}
    assert dtypes == {name: known[name] for name in dtypes}
    assert {"bfloat16", "float32"} <= set(dtypes.values())
    regions = {op.name: op.attrs.get("autocast") for op in graph.operators}
    assert regions["first_autocast_off"] == "off"
    (mixing,) = {op.attrs.get("mixes_samples", False) for op in graph.operators}
    assert not mixing

"""What draws random numbers is known, and is never computed by several devices alike."""

import pytest
import torch
import torch.nn.functional as F
from nets import Call, task_on
from torch import fx, nn

from harness.domain.sharding import may_have_copies
from harness.runtime.capture.capture import capture
from harness.runtime.capture.operators import DropoutOff, draws_random, is_dropout


@fx.wrap
def stochastic_depth(x, p, mode, training=True):
    """As torchvision's is called."""
    return x


def node_of(model):
    root = fx.symbolic_trace(model)
    node = next(n for n in root.graph.nodes if n.op.startswith("call"))
    return node, root


DROPOUTS = [
    nn.Sequential(nn.Dropout(0.1)),
    nn.Sequential(nn.Dropout2d(0.1)),
    Call(F.dropout),
    Call(lambda x: F.dropout(x, 0.1)),
    Call(lambda x: torch.dropout(x, 0.1, True)),
]
DRAWING = [
    nn.Sequential(nn.Dropout1d(0.1)),
    nn.Sequential(nn.Dropout3d(0.1)),
    nn.Sequential(nn.AlphaDropout(0.1)),
    nn.Sequential(nn.FeatureAlphaDropout(0.1)),
    nn.Sequential(nn.RReLU()),
    nn.Sequential(nn.FractionalMaxPool2d(2, output_size=2)),
    nn.Sequential(nn.TransformerEncoderLayer(4, 2, dropout=0.1)),
    nn.Sequential(nn.LSTM(4, 4, num_layers=2, dropout=0.1)),
    Call(lambda x: F.dropout2d(x, 0.1)),
    Call(lambda x: F.alpha_dropout(x, 0.1, True)),
    Call(lambda x: F.rrelu(x, training=True)),
    Call(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.1)),
    Call(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
    Call(lambda x: stochastic_depth(x, 0.1, "batch")),
    Call(torch.rand_like),
    Call(lambda x: x.bernoulli()),
]
STILL = [
    nn.Sequential(nn.Dropout(0.0)),
    nn.Sequential(nn.Dropout1d(0.1)).eval(),
    nn.Sequential(nn.RReLU()).eval(),
    nn.Sequential(nn.TransformerEncoderLayer(4, 2, dropout=0.0)),
    nn.Sequential(nn.ReLU()),
    Call(lambda x: F.dropout(x, 0.1, False)),
    Call(lambda x: F.dropout(x, training=False)),
    Call(lambda x: F.alpha_dropout(x, 0.1)),
    Call(lambda x: F.scaled_dot_product_attention(x, x, x)),
    Call(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.0)),
]


@pytest.mark.parametrize("model", DROPOUTS + DRAWING + STILL)
def test_what_draws_is_told_by_module_function_and_probability(model):
    node, root = node_of(model)
    assert draws_random(node, root) == (model not in STILL)
    assert is_dropout(node, root) == (model in DROPOUTS)


@pytest.mark.parametrize(
    ("model", "may_have"),
    [
        (Call(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.1)), False),
        (Call(lambda x: F.scaled_dot_product_attention(x, x, x)), True),
        (nn.Sequential(nn.Dropout1d(0.1)), False),
        (nn.Sequential(nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Hardtanh()), False),  # not known
        (nn.Sequential(nn.ReLU()), True),
    ],
)
def test_what_may_differ_between_devices_has_no_copies(model, may_have):
    operator = capture(task_on(model, 3, 4), 2, "model").graph.operators[1]
    assert may_have_copies(operator) is may_have


def attention_by_a_function(x):
    heads, out, bias = torch.eye(8).repeat(3, 1), torch.eye(8), torch.zeros(8)
    options = (None, None, False, 0.5, out, bias)
    found = F.multi_head_attention_forward(x, x, x, 8, 2, heads, None, *options, training=True)
    return found[0]


@pytest.mark.parametrize(
    "drop",
    [
        attention_by_a_function,
        lambda x: torch.dropout_(x.clone(), 0.5, True),
        lambda x: torch.ops.aten.dropout.default(x, 0.5, True),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
)
def test_functions_that_are_called_as_in_training_drop_nothing(drop):
    x = torch.arange(1.0, 65.0).view(4, 2, 8)
    with DropoutOff():
        found, again = drop(x), drop(x)
    assert found.ne(0).all()
    torch.testing.assert_close(found, again, rtol=0, atol=0)

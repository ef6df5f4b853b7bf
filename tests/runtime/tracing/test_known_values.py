"""Control flow by values that no input changes is followed; by others, it is refused."""

import pytest
import torch
from nets import held, users_task
from torch import nn

from harness.errors import ModelError
from harness.runtime.tracing.export import strided


def flag_of_sizes(x):
    mask = torch.ones(len(x), 6)
    mask[:, :2] = 0
    x = x * 2 if mask.any().item() else x - 1
    return x + int(mask.sum(1).max())


def clamp_if_infinite(x):
    if not torch.isfinite(x).all() or torch.isnan(x).any() | torch.isinf(x).any():
        x = torch.clamp(x, -0.1, 0.1)
    return x


def read_before_a_write(x):
    seen = torch.zeros_like(x)
    x = x + 1 if not seen.any() else x
    seen.view(-1).copy_(x.flatten())
    return x + seen


def drawn_without_a_generator(x):
    x = x * 2 if torch.ones(len(x), 6).any() else x
    return x + torch.randn(len(x), 6, generator=None)


def read_after_a_write(x):
    seen = torch.zeros_like(x)
    seen.view(-1).copy_(x.flatten())
    return x + 1 if seen.any() else x


def count_of_samples(x):
    return x + 1 if torch.ones(len(x)).sum() > 4 else x


def check_and_value(x):
    wrong = torch.isnan(x)
    wrong |= x > 4
    return x + 1 if wrong.any() else x


def value_of_input(x):
    return x + 1 if x.sum() > 4 else x


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), middle

    def forward(self, x):
        return self.middle(self.first(x))


def captured(middle, kind=Net):
    return held(users_task(kind(middle), {"x": torch.randn(2, 6)}), 8)


@pytest.mark.parametrize(
    "middle", [flag_of_sizes, clamp_if_infinite, read_before_a_write, drawn_without_a_generator]
)
def test_values_of_sizes_alone_are_followed(middle):
    captured(middle)


@pytest.mark.parametrize(
    "middle", [read_after_a_write, count_of_samples, check_and_value, value_of_input]
)
def test_a_value_that_an_input_changes_is_refused_by_its_line(middle):
    with pytest.raises(ModelError, match=f"by the values of a tensor.*py:.* in {middle.__name__}"):
        captured(middle)


def test_a_check_whether_values_are_finite_is_said_to_be_left_out(caplog):
    captured(clamp_if_infinite)
    assert "test_known_values.py" in caplog.text
    assert "the graph leaves out what it does when they are not" in caplog.text


@pytest.mark.parametrize("is_exported", [False, True])
def test_weights_are_assigned_where_a_mask_is_true(is_exported):
    class Masked(Net):
        def forward(self, x):
            y = self.first(x)
            for _ in range(x.shape[1] - 4 if is_exported else 2):
                y[x.sum(1) > 0] = self.first.bias
            return y

    captured(None, Masked)


def test_as_strided_reads_its_input_in_the_layout_of_the_model():
    def middle(x):
        rows = x.view(len(x), 3, 2).transpose(1, 2)
        return rows.as_strided((len(x), 2, 3), (6, 3, 1)).flatten(1)

    (node,) = (n for n in captured(middle).module.graph.nodes if n.target is strided)
    x = torch.randn(8, 2, 3).transpose(1, 2).contiguous().transpose(1, 2)  # as in the model
    _, order, *view = node.args
    view = [[8, *view[0][1:]], *view[1:]]
    assert strided(x.contiguous(), order, *view).equal(x.as_strided(*view))

"""Samples are named where they are, and cut only where they come apart."""

import pytest
import torch
from nets import task_on
from torch import nn

from harness.runtime.capture.capture import capture
from harness.runtime.capture.sample_dims import is_cut_by_samples, is_uneven, placed, sample_dims


def test_a_dim_that_is_the_sum_of_its_parts_counts_samples():
    assert sample_dims((6, 3), [(4, 3), (1, 3), (3, 3)], (4, 1, 3), 6) == (0,)
    assert sample_dims((3, 12), [(3, 8), (3, 2), (3, 6)], (4, 1, 3), 6) == (1,)
    assert sample_dims((1, 7), [(1, 5), (1, 2), (1, 4)], (4, 1, 3), 6) == ()
    # A third of the samples, rounded up: 2 is 1 + 1 by accident.
    assert sample_dims((2, 7), [(2, 7), (1, 7), (1, 7)], (4, 1, 3), 6) == ()
    assert sample_dims((6, 6), [(4, 4), (1, 1), (3, 3)], (4, 1, 3), 6) == (0, 1)


def test_at_one_batch_size_the_first_dim_counts_samples_if_the_batch_divides_it():
    assert sample_dims((8, 3), [], [], 4) == (0,)
    assert sample_dims((6, 4), [], [], 4) == ()
    assert sample_dims((), [], [], 4) == ()


@pytest.mark.parametrize(
    ("kind", "function", "output", "inputs", "expected"),
    [
        ("linear", "Linear", ((4, 3), (0,)), [((4, 2), (0,))], True),
        ("other", "permute", ((5, 4), (1,)), [((4, 5), (0,))], True),
        ("other", "view", ((20, 3), (0,)), [((4, 5, 3), (0,))], True),
        ("other", "view", ((20, 3), (0,)), [((5, 4, 3), (1,))], False),
        ("other", "view", ((5, 4, 3), (1,)), [((4, 5, 3), (0,))], False),
        ("cat", "cat", ((8, 3), (0,)), [((4, 3), (0,)), ((4, 3), (0,))], False),
        ("cat", "cat", ((4, 6), (0,)), [((4, 3), (0,)), ((4, 3), (0,))], True),
        ("other", "chunk", ((2, 3), (0,)), [((4, 3), (0,))], False),
        ("other", "matmul", ((4, 4), (0, 1)), [((4, 3), (0,)), ((3, 4), (1,))], False),
        ("add", "add", ((4, 4), (0,)), [((4, 3), (0,)), ((4,), (0,))], False),
        ("add", "add", ((4, 3), (0,)), [((4, 3), (0,)), ((3,), ())], True),
        ("other", "mean", ((3,), ()), [((4, 3), (0,))], False),
    ],
)
def test_what_can_be_cut_by_samples(kind, function, output, inputs, expected):
    assert is_cut_by_samples(kind, function, output, inputs) is expected


class Sequences(nn.Module):
    """Computes with the sequence first, as recurrent models do, around a learned position."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3, 1, 6))
        self.conv = nn.Conv2d(1, 1, (2, 3), padding="same", padding_mode="circular")
        self.norm = nn.LayerNorm([6])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.conv(x.unsqueeze(1)).squeeze(1)
        x = x.permute(1, 0, 2) + self.position * 2
        x = torch.cat([x, x], dim=1).mean(0)
        return self.head(self.norm(x))[: x.size(0) // 2]


def test_a_captured_graph_says_which_operators_have_their_samples_apart():
    graph = capture(task_on(Sequences(), 3, 6, n_classes=2), 4, "sequences").graph
    found = {op.name: op for op in graph.operators}
    assert found["conv"].attrs["padding"] == [0, 1]
    assert found["conv"].attrs["padding_mode"] == "circular"
    assert found["norm"].attrs["n_normalized"] == 1
    assert list(found["permute"].shape) == ["seq", "sample", "feature"]
    assert found["mul"].shape == {"feature": 3, "height": 1, "width": 6}
    assert list(found["add"].shape.items()) == [("seq", 3), ("sample", 4), ("feature", 6)]
    assert found["cat"].shape["sample"] == 8
    assert found["head"].shape == {"sample": 8, "feature": 2}
    apart = {name for name, op in found.items() if op.attrs.get("is_cut_by_samples", True)}
    assert {"conv", "permute", "add", "mean", "norm", "head"} <= apart
    assert not {"mul", "cat", "getitem"} & apart


def test_a_part_of_the_samples_is_uneven():
    batches = (4, 1, 3)
    assert is_uneven([[(2, 7)], [(0, 7)], [(1, 7)]], batches)  # the first half of them
    assert is_uneven([[(4, 7), (1, 7)], [(1, 7)], [(3, 7)]], batches)
    assert not is_uneven([[(8, 7), (3,)], [(2, 7), (3,)], [(6, 7), (3,)]], batches)


def test_features_take_the_places_of_their_own_sample():
    mask = torch.tensor([[True, False, True], [False, True, True]])
    found = placed(torch.zeros(2, 3), mask, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert found.tolist() == [[1, 0, 2], [0, 3, 4]]
    mask[0, 0] = False
    found = placed(torch.zeros(2, 3), mask, torch.ones(2, 2))
    assert found.isnan().all(1).tolist() == [True, False]

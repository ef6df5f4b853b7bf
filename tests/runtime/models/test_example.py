"""A task from example inputs: shapes, ranges and targets; a model of transformers has its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.errors import ModelError
from harness.runtime.capture.capture import capture
from harness.runtime.faithfulness.comparison import hold_to_model
from harness.runtime.models import InputSpec, ModelOptions, Task
from harness.runtime.models.factory import task_of
from harness.runtime.models.task import TextOptions
from harness.runtime.models.torchvision_import import allow_torchvision

ROOT = Path(__file__).parents[3]
OPTIONS = ModelOptions(n_classes=7, n_channels=3, image_size=32)
TOKENS = torch.tensor([[4, 1, 2], [0, 3, 1]])


class Tagger(nn.Module):
    """Reads tokens and, nested in a dict, a table; gives classes for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(5, 6), nn.Linear(6, 9)

    def forward(self, skipped=None, *, tokens, more):
        assert skipped is None
        positions = torch.arange(tokens.shape[1])
        mask = (positions[:, None] >= positions).float()
        return {"loss": None, "out": self.last(mask @ self.words(tokens) + more["table"])}


def test_inputs_and_targets_are_read_off_an_example():
    table = torch.rand(2, 3, 6)
    task = task_of("m:f", (Tagger(), {"tokens": TOKENS, "more": {"table": table}}), OPTIONS)
    assert task.inputs == (
        InputSpec(name="tokens", shape=(3,), dtype=torch.int64, n_values=5),
        InputSpec(name="more_table", shape=(3, 6)),
    )
    assert (task.n_classes, task.target_shape, task.loss) == (9, (3,), "cross_entropy")
    captured = capture(task, 4, "tagger")
    hold_to_model(task, captured, "tagger")
    # The mask is a constant, so no operator makes it.
    functions = [op.attrs["function"] for op in captured.graph.operators if op.kind != "input"]
    assert functions == ["Embedding", "matmul", "add", "Linear", "cross_entropy"]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "its example holds nothing: give tensors"),
        ({"tokens": 3}, "its example holds int: give tensors"),
        ({"tokens": TOKENS}, "its forward does not take the example: TypeError"),
    ],
)
def test_a_wrong_example_is_refused_in_one_line(example, message):
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        task_of("m:f", (Tagger(), example), OPTIONS)
    assert "\n" not in str(caught.value)


def documented(page: str, file: str) -> dict:
    """The names that a page's Python block of a file defines."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"# {file}")]
    allow_torchvision()
    names: dict = {}
    exec(block, names)
    return names


@pytest.mark.parametrize(
    ("file", "factory", "shapes", "target_shape", "n_classes"),
    [
        ("hub.py", "bert", [(16,)], (), 2),
        ("hub.py", "gpt", [(16,)], (16,), 50257),
        ("hub.py", "convnext", [(3, 32, 32)], (), 1000),
        ("pairs.py", "pairs", [(3,), (100,)], (), 5),
    ],
)
def test_documented_factories_are_captured(file, factory, shapes, target_shape, n_classes):
    options = replace(OPTIONS, n_classes=1000, text=TextOptions(sequence_length=16))
    task = task_of("m:f", documented("docs/models.md", file)[factory](), options)
    assert isinstance(task, Task)
    assert [spec.shape for spec in task.inputs] == shapes
    assert (task.target_shape, task.n_classes) == (target_shape, n_classes)
    captured = capture(task, 4, factory)
    hold_to_model(task, captured, factory)
    assert not [op.name for op in captured.graph.operators if op.attrs.get("mixes_samples")]

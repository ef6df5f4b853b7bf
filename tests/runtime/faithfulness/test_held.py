"""A graph is held to its model once; whatever could change the answer makes it another graph."""

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from nets import built_in, task_on
from torch import nn
from zoo import ZOO

from harness.errors import ModelError
from harness.runtime.capture.capture import capture
from harness.runtime.faithfulness import held
from harness.runtime.faithfulness.held import HELD_FILE, hold_once, key_of


@pytest.fixture
def held_graphs(monkeypatch):
    """Names of the graphs that were held."""
    names = []
    monkeypatch.setattr(held, "hold_to_model", lambda task, graph, name, dtype: names.append(name))
    return names


def plain(change=lambda model: None):
    task = ZOO["plain"].task()
    change(task.model)
    return task, capture(task, 8, "plain")


BROKEN = (
    b"", b"{", b"null", b'{"models": 3}', b'{"schema": "other"}', b"\xff\xfe", b"[" * 100_000,
    b'{"models": {"a": 1}}',
)  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "n_held"),
    [
        (lambda path: None, 1),
        *((partial(Path.write_bytes, data=content), 1) for content in BROKEN),
        (os.mkfifo, 1),  # which is replaced
        (Path.mkdir, 2),  # where a file cannot be written, only the memory is lost
    ],
)
def test_a_graph_is_held_once(prepare, n_held, tmp_path, held_graphs):
    prepare(tmp_path / HELD_FILE)
    for _ in range(2):
        task, captured = plain()
        hold_once(captured, task, "plain", "fp32", tmp_path)
    assert held_graphs == ["plain"] * n_held


def test_what_is_refused_is_not_remembered(tmp_path):
    task = ZOO["per_pixel"].task()
    captured = plain()[1]
    for _ in range(2):
        with pytest.raises(ModelError, match="one device cannot train"):
            hold_once(captured, task, "pixels", "fp32", tmp_path)
    assert not (tmp_path / HELD_FILE).exists()


CHANGES = {
    "a number": lambda model: setattr(model, "depth", 3),
    "a mode": lambda model: model.second.eval(),
    "a hook": lambda model: model.second.register_forward_hook(lambda *_: None),
    "a hook on a parameter": lambda model: model.second.weight.register_hook(lambda g: g),
    "a frozen parameter": lambda model: model.second.bias.requires_grad_(False),
    "a buffer": lambda model: model.register_buffer("seen", torch.zeros(3)),
    "a dtype": lambda model: model.float(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_another(name):
    task, captured = plain()
    before = key_of(task, captured, "fp32")
    CHANGES[name](task.model)
    assert key_of(task, captured, "fp32") != before


def test_weights_and_random_numbers_make_no_other_model():
    first, second = plain(), plain(lambda model: nn.init.normal_(model.second.weight))
    assert key_of(*first, "fp32") == key_of(*second, "fp32")
    assert key_of(*first, "fp32") != key_of(*first, "bf16")


SOURCE = """
import torch
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x)) * {factor}
"""


def test_a_changed_source_is_another_model(tmp_path):
    keys = []
    for factor in (2, 3):
        path = tmp_path / f"model{factor}.py"
        path.write_text(SOURCE.format(factor=factor))
        spec = importlib.util.spec_from_file_location(f"changing_model{factor}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        task = task_on(module.Model(4, 3))
        keys.append(key_of(task, capture(task, 8, "model"), "fp32"))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("name", ["lenet", "resnet18", "dlrm"])
def test_a_model_without_weights_is_the_same(name):
    keys = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            task = built_in(name, image_size=0 if name == "dlrm" else 32)
            keys.append(key_of(task, capture(task, 8, name), "fp32"))
    assert keys[0] == keys[1]

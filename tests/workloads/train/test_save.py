"""Saving a model gathers the model alone, under all its names."""

from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from harness.workloads.train.config import TrainCase
from harness.workloads.train.workload import _save


class ModelOnly:
    """An engine whose optimizer's state nobody may ask for."""

    def model_state(self, *, is_for_first):
        weight = torch.arange(6.0).reshape(2, 3)
        named = {"encoder.weight": weight, "decoder.weight": weight, "model.bias": torch.ones(2)}
        return {f"model.{name}": tensor for name, tensor in named.items()}


def test_tied_weights_are_written_under_each_name_and_no_optimizer_is_gathered(tmp_path):
    context = SimpleNamespace(world=SimpleNamespace(is_first=True), run_dir=tmp_path)
    _save(TrainCase(save_model=True), SimpleNamespace(engine=ModelOnly(), prefix="model."), context)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "encoder.weight": (2, 3), "decoder.weight": (2, 3), "model.bias": (2,)
    }  # fmt: skip
    assert torch.equal(found["decoder.weight"], found["encoder.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]

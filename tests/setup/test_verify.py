"""What an installation is told of GPUs that it cannot use."""

import importlib.util
from pathlib import Path

import pytest
import torch

_FILE = Path(__file__).parents[2] / "setup" / "verify.py"


@pytest.mark.parametrize(
    ("cuda", "n_gpus", "is_available", "is_told"),
    [("13.0", 2, False, True), ("13.0", 2, True, False), ("13.0", 0, False, False),
     (None, 2, False, False)],
)  # fmt: skip
def test_cards_that_stand_idle_are_told(cuda, n_gpus, is_available, is_told, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    spec = importlib.util.spec_from_file_location("verify", _FILE)
    verify = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verify)
    text = "this host has 2 GPUs, and this torch (CUDA 13.0) cannot start them" if is_told else ""
    assert verify.gpu_problem().startswith(text)
    assert bool(verify.gpu_problem()) == is_told

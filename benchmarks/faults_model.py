"""A user's model of three layers, which fails on one rank once a trigger file exists.

FAULT_TRIGGER is the path of that file, which contains a fault and a rank, such as `sleep 1`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, fx, nn

_N_FEATURES = 64


def _fail(fault: str, x: Tensor) -> Tensor:
    if fault == "sleep":
        time.sleep(600)
    if fault == "exit":
        os._exit(3)
    if fault == "raise":
        raise RuntimeError("the user's model has a bug")
    if fault == "memory":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(2**20)) * 16)
    return x * float("nan")


def _own_fault() -> str:
    """The fault of this rank; empty if it has none."""
    trigger = Path(os.environ["FAULT_TRIGGER"])
    fault, rank = trigger.read_text().split() if trigger.exists() else ("", "")
    return fault if rank == os.environ["OMPI_COMM_WORLD_RANK"] else ""


@fx.wrap
def troubled(x: Tensor) -> Tensor:
    """Return the input, or fail if the trigger file says so."""
    fault = "" if x.device.type == "meta" else _own_fault()
    return _fail(fault, x) if fault else x * 1.0


_linear = nn.functional.linear


def _troubled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    fault = "" if x.device.type == "meta" else _own_fault()
    return _linear(_fail(fault, x) if fault else x, weight, bias)


nn.functional.linear = _troubled_linear  # a stage may be one linear layer


class Model(nn.Module):
    """Linear layers, with `troubled` before and after each, so that any stage fails."""

    def __init__(self, n_features: int, n_classes: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.first = nn.Linear(n_features, _N_FEATURES)
        self.second = nn.Linear(_N_FEATURES, _N_FEATURES)
        self.third = nn.Linear(_N_FEATURES, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = troubled(self.first(troubled(self.flatten(x))))
        x = troubled(self.second(troubled(torch.relu(x))))
        return troubled(self.third(troubled(torch.relu(x))))


def model(n_classes: int, n_channels: int, image_size: int) -> Model:
    """Build the model for images of any size, or fail."""
    if _own_fault() == "build":
        raise RuntimeError("the user's model cannot be built")
    return Model(n_channels * image_size**2, n_classes)

"""The train workload's models in float64: factories for `--model double_models:alexnet`.

Weights and samples are float32 values converted to float64, so that both precisions start equally;
loss, gradients and updates have 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.runtime.models import MODELS, build_task, fit_options
from harness.runtime.models.task import ModelOptions, Task


class Widened(nn.Module):
    """A float64 model with float32 inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, *inputs: Tensor) -> Tensor:
        wide = (x.double() if x.is_floating_point() else x for x in inputs)
        outputs: Tensor = self.model(*wide)
        return outputs


@dataclass(frozen=True, kw_only=True)
class DoubleTask(Task):
    """A task whose loss stays float64."""

    def sum_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss == "cross_entropy":
            return F.cross_entropy(outputs, targets, reduction="sum")
        return F.binary_cross_entropy_with_logits(
            outputs.reshape(-1), targets.to(torch.float64).reshape(-1), reduction="sum"
        )


def _build(name: str, image_size: int = 0) -> Task:
    task = build_task(name, fit_options(name, ModelOptions(image_size=image_size)))
    return DoubleTask(
        model=Widened(task.model), inputs=task.inputs, loss=task.loss, n_classes=task.n_classes
    )


def __getattr__(name: str) -> Callable[..., Task]:
    """Return a factory for any name in MODELS."""
    if name not in MODELS:
        raise AttributeError(name)
    return partial(_build, name)

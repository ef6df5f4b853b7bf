"""The optimizers that a run can use: the OPTIMIZERS table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from harness.errors import ConfigError

OptimizerVariant = Literal["sgd", "momentum", "adamw"]
# Tensors of a parameter's shape in the state of each kind of step.
STATES_PER_PARAMETER: dict[OptimizerVariant, int] = {"sgd": 0, "momentum": 1, "adamw": 2}


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """An optimizer and its hyperparameters; only sgd uses `momentum`."""

    name: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0

    @property
    def variant(self) -> OptimizerVariant:
        """The kind of step, which determines its time and state: sgd with momentum is its own."""
        if self.name == "sgd" and self.momentum > 0:
            return "momentum"
        return "adamw" if self.name == "adamw" else "sgd"


def _sgd(model: nn.Module, options: OptimizerOptions, is_fused: bool) -> Optimizer:
    return SGD(
        model.parameters(),
        lr=options.learning_rate,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        fused=is_fused or None,
    )


def _adamw(model: nn.Module, options: OptimizerOptions, is_fused: bool) -> Optimizer:
    return AdamW(
        model.parameters(),
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        fused=is_fused or None,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module, OptimizerOptions, bool], Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that is not in OPTIMIZERS.

    Raises:
        ConfigError: there is no such optimizer.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"there is no optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")


def make_optimizer(model: nn.Module, options: OptimizerOptions, device: torch.device) -> Optimizer:
    """Make an optimizer; on a GPU a fused one, which unscales fp16 gradients without waiting.

    Raises:
        ConfigError: there is no such optimizer.
    """
    check_optimizer(options.name)
    return OPTIMIZERS[options.name](model, options, device.type == "cuda")


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Use a learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate

"""The optimizers that a run can use: the OPTIMIZERS table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from harness.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Which optimizer, and its numbers; `momentum` is sgd's alone."""

    name: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0


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


def make_optimizer(model: nn.Module, options: OptimizerOptions, device: torch.device) -> Optimizer:
    """Make an optimizer; on a GPU a fused one, which unscales fp16 gradients without waiting.

    Raises:
        ConfigError: no such optimizer.
    """
    if options.name not in OPTIMIZERS:
        raise ConfigError(
            f"there is no optimizer {options.name!r}: choose one of {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[options.name](model, options, device.type == "cuda")

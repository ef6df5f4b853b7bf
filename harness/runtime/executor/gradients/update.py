"""Between the sum of gradients and the update: the scale of fp16, and hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.ranks.world import World


class LossScale:
    """The factor of the losses; 1 for other dtypes than fp16.

    Raises:
        ConfigError: fp16 and asynchronous, because each microbatch would need a factor of its own.
    """

    def __init__(self, dtype: str, world: World, *, is_asynchronous: bool) -> None:
        if dtype == "fp16" and is_asynchronous:
            raise ConfigError(
                "asynchronous training has no loss scaling for fp16: use --dtype bf16"
            )
        self._scaler: torch.amp.GradScaler | None = None
        self._device = world.device
        if dtype == "fp16" and world.size > 1:
            # Imported here, because torch.distributed.fsdp takes a third as long as torch.
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self._scaler = ShardedGradScaler(world.device.type, process_group=dist.group.WORLD)
        elif dtype == "fp16":
            self._scaler = torch.amp.GradScaler(world.device.type)

    def factor(self) -> float:
        """The factor of this step's losses."""
        if self._scaler is None:
            return 1.0
        scaled: Tensor = self._scaler.scale(torch.ones((), device=self._device))
        return float(scaled)

    def unscale(self, optimizer: torch.optim.Optimizer, *, is_muted: bool) -> None:
        """Divide the gradients by the factor; all ranks must call it."""
        if self._scaler is None or is_muted:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):  # a rank without weights takes part
            parameters[0].grad = torch.zeros_like(parameters[0])
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *, is_muted: bool) -> None:
        """Update the weights, unless gradients overflowed."""
        if self._scaler is None or is_muted:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        self._scaler.update()


Hook = Callable[[Any], Any]


class ParameterHooks:
    """Removes the hooks of a model's parameters, and runs them when gradients are complete.

    Operators that use such a parameter are never cut along the parameter's dims.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, list[Hook]] = {}
        self._after: dict[str, list[Hook]] = {}
        for name, parameter in model.named_parameters():
            self._before[name] = _take_hooks(parameter._backward_hooks)
            self._after[name] = _take_hooks(parameter._post_accumulate_grad_hooks)

    def first(self) -> str | None:
        """The name of a parameter with a hook; None if there is none."""
        return next(
            (name for name in self._before if self._before[name] or self._after[name]), None
        )

    @torch.no_grad()
    def run(self, parameters: Mapping[WeightSlice, nn.Parameter]) -> None:
        """Run the hooks of each parameter; hooks that may replace the gradient come first."""
        for piece, parameter in parameters.items():
            if parameter.grad is None:
                continue
            for hook in self._before.get(piece.name, ()):
                replaced = hook(parameter.grad)
                if replaced is not None and replaced is not parameter.grad:
                    parameter.grad.copy_(replaced)  # in place, because buckets refer to it
            for hook in self._after.get(piece.name, ()):
                hook(parameter)


def _take_hooks(hooks: Any) -> list[Hook]:
    found = list(hooks.values()) if hooks else []
    if hooks:
        hooks.clear()
    return found

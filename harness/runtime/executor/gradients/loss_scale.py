"""Loss scaling for fp16: a step in which any rank's gradients overflow is skipped on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from harness.errors import ConfigError
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

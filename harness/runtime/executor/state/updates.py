"""Step the optimizer on the parameters that a rank owns, and send them to their other holders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.executor.gradients.loss_scale import LossScale
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.state.owners import Owners
from harness.runtime.executor.state.units import WeightUnit
from harness.runtime.executor.state.weights import Weights

# Units on their way at once, because each needs memory for what it receives.
_MOST_ON_THEIR_WAY = 2


class WeightUpdater:
    """Updates the weights of one rank.

    Args:
        units: this rank's units that are not freed, in the order of all their holders.
    """

    def __init__(
        self,
        owners: Owners,
        weights: Weights,
        units: Sequence[WeightUnit],
        options: OptimizerOptions,
        device: torch.device,
    ) -> None:
        self._owners, self._weights, self._units = owners, weights, list(units)
        own = list(owners.own.values())
        self.optimizer = make_optimizer(
            nn.ParameterList(own) if own else nn.Linear(1, 1), options, device
        )

    def assign_gradients(self) -> None:
        """Let own parts of all-reduced gradients refer to them."""
        if self._owners.shards_gradients:
            return  # they have sums of their own
        for one in self._owners.shared:
            gradient, part = one.parameter.grad, one.own_part
            if one.own is not None and part is not None and gradient is not None:
                one.own.grad = part.within(one.piece).take(gradient)

    def update(self, phases: Phases, scale: LossScale, *, is_muted: bool) -> None:
        """Update the weights and free their gradients; all holders must call it.

        Args:
            scale: skips the step where gradients overflowed.
            is_muted: without communication.

        Raises:
            PeerError: another holder died or hangs; NCCL ends this process instead.
        """
        phases.begin("optimizer")
        scale.step(self.optimizer, is_muted=is_muted)
        for parameter in (*self._weights.parameters(), *self._owners.own.values()):
            parameter.grad = None
        if not self._units or is_muted:
            return
        phases.begin("communication", name="weights")
        for k, unit in enumerate(self._units):
            unit.start(is_muted=False)
            if k >= _MOST_ON_THEIR_WAY - 1:
                self._units[k - _MOST_ON_THEIR_WAY + 1].finish(phases)
        for unit in self._units[-_MOST_ON_THEIR_WAY + 1 :]:
            unit.finish(phases)

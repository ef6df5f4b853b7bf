"""The learning rate of each step, by the schedulers of torch.optim: the LR_SCHEDULES table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

LrSchedule = Literal["constant", "step", "cosine"]

# From an optimizer, the period in steps, and the factor of each drop.
LR_SCHEDULES: dict[LrSchedule, Callable[[Optimizer, int, float], LRScheduler | None]] = {
    "constant": lambda optimizer, period, gamma: None,
    "step": lambda optimizer, period, gamma: StepLR(optimizer, period, gamma),
    "cosine": lambda optimizer, period, gamma: CosineAnnealingLR(optimizer, period),
}


class LearningRates:
    """The rates of one run. They depend on the step alone, so every engine and every strategy has
    the same ones, and so has a run that continues another.

    Args:
        period: steps between two drops, or until the cosine is 0.
        gamma: factor of each drop of `step`.
    """

    def __init__(self, rate: float, schedule: LrSchedule, period: int, gamma: float) -> None:
        # The scheduler's own, because an engine may be replaced while training.
        self._optimizer = SGD([torch.zeros(1)], lr=rate)
        self._scheduler = LR_SCHEDULES[schedule](self._optimizer, period, gamma)
        self._rates = [rate]

    def at(self, step: int) -> float:
        """The rate of a measured step; warm-up steps, below 0, have that of the first."""
        while self._scheduler is not None and len(self._rates) <= step:
            self._optimizer.step()  # else torch warns about the order
            self._scheduler.step()
            self._rates.append(float(self._scheduler.get_last_lr()[0]))
        return self._rates[min(max(0, step), len(self._rates) - 1)]

    def first_drop(self, factor: float, start: int, stop: int) -> int | None:
        """The first step below `stop` whose rate is at most the `factor`-th part of that of
        `start`; None if there is none."""
        limit = self.at(start) / factor * (1 + 1e-9)  # rates are rounded
        return next((step for step in range(start + 1, stop) if self.at(step) <= limit), None)

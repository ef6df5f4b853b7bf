"""The loss of each step, summed over ranks every few seconds of training."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import VerificationError
from harness.runtime.ranks.gather import maximum_over_ranks
from harness.runtime.ranks.world import Context
from harness.units import format_duration

# Time between two sums, for which ranks wait for each other and for their devices.
_INTERVAL_S = 10.0
_MOST_STEPS = 1000


class LossLog:
    """Records the global loss of each measured step; all ranks must make the same calls.

    Losses stay on the device until they are summed, between two steps, so that no step waits for
    them. A sum is due at the end of the warm-up, and then after as many steps as take 10 s.

    Args:
        first: the first measured step, see `TrainLoop`.

    Attributes:
        values: the loss of each measured step so far.
    """

    def __init__(self, context: Context, first: int = 0) -> None:
        self._context, self._first = context, first
        self._kept: list[tuple[int, Tensor]] = []
        self._start_s = time.perf_counter()
        self._n_due = math.inf
        self._is_begun, self._step_s = False, 0.0
        self.values: list[float] = []

    @property
    def note(self) -> str:
        """The last loss that is known, and the time of a step before it, for people."""
        if not self.values:
            return ""
        return f"loss {self.values[-1]:.4g}, {format_duration(self._step_s)} a step"

    def add(self, step: int, loss: Tensor) -> None:
        """Keep this rank's part of a step's loss; warm-up steps are below 0."""
        self._kept.append((step, loss))
        if step == -1 or (step >= 0 and not self._is_begun):
            self._n_due = 0

    def end_step(self) -> None:
        """Record the losses so far if that is due.

        Raises:
            VerificationError: a loss is not finite.
        """
        if len(self._kept) >= self._n_due:
            self.record()

    def record(self) -> None:
        """Sum the losses so far over all ranks and record them; see `end_step`."""
        if not self._kept:
            return
        steps, kept = zip(*self._kept, strict=True)
        losses = torch.stack(kept).float()
        taken_s, world = time.perf_counter() - self._start_s, self._context.world
        if world.size > 1:
            taken_s = maximum_over_ranks([taken_s], world)[0]  # ranks without work take none
            dist.all_reduce(losses)
        for step, value in zip(steps, losses.tolist(), strict=True):
            self._check(step, value)
            if step >= 0:
                self._context.recorder.sample("loss", value, step=step)
                self.values.append(value)
        self._step_s = taken_s / len(steps)
        self._n_due = max(1, round(_INTERVAL_S / max(self._step_s, _INTERVAL_S / _MOST_STEPS)))
        self._kept, self._is_begun = [], True
        self._start_s = time.perf_counter()

    def _check(self, step: int, value: float) -> None:
        if math.isfinite(value):
            return
        is_untrained = not self._is_begun and step == self._kept[0][0] and not self._first
        if is_untrained:
            raise VerificationError(
                f"the loss is {value} from the first step on, whatever the learning rate: look "
                "for values that are not finite in the data and in the weights, and for an "
                "operator that makes them of these inputs (a division by 0, unequal numbers of "
                "image tokens and of features of images)"
            )
        if step >= 0:
            raise VerificationError(
                f"the loss is {value} from step {step} on: lower --learning-rate"
            )

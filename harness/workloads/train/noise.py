"""Steps without updates that measure the gradient noise scale by any strategy.

Steps of different samples alternate with steps of few samples that repeat. The mean gradient of a
batch in which each of n samples stands m times is that of n samples, so that batches of one size,
as a strategy takes them, give the norms of the mean gradients of two numbers of samples.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from harness.runtime.data.batch import BatchPlan
from harness.runtime.ranks.gather import barrier
from harness.runtime.ranks.world import Context

if TYPE_CHECKING:
    from harness.workloads.train.setup import Training

_log = logging.getLogger(__name__)

# Of a batch's samples, in the steps of few: fewer would be noisier, more too close to all.
_MOST_DISTINCT = 1 / 8


@dataclass(frozen=True, kw_only=True)
class DrawnSamples(BatchPlan):
    """Batches of samples that are drawn independently of each other, so that a sample may come
    twice; in every second batch few of them repeat."""

    def n_distinct(self, step: int) -> int:
        """Samples that are drawn for a step's batch, of which it is a multiple."""
        batch = self.global_batch
        if step % 2 == 0:
            return batch
        most = max(1, int(batch * _MOST_DISTINCT))
        return next(n for n in range(most, 0, -1) if batch % n == 0)

    def global_indices(self, step: int, *, has_epochs: bool = False) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        n = self.n_distinct(step)
        drawn: list[int] = torch.randint(self.n_samples, (n,), generator=generator).tolist()
        return drawn * (self.global_batch // n)

    def sizes(self, step: int) -> list[int]:
        return list(self.shares)


def warn_of_masks(model: nn.Module) -> None:
    """Warn where copies of a sample have unlike gradients."""
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        _log.warning(
            "dropout draws a mask for each copy of a sample, which makes the gradient noise scale "
            "too low: measure it with --dropout 0"
        )


def gradient_norms(training: Training, context: Context, n_steps: int, name: str) -> list[float]:
    """The norm of each step's mean gradient, over samples: gradients are means over targets, and
    few samples with unlike numbers of them would weigh as much as others with more."""
    engine, rank, found = training.engine, context.world.rank, []
    shares = [training.share(step, rank) for step in range(n_steps)]
    n_targets = sum(share.n_targets() for share in shares) / n_steps
    for step, share in enumerate(shares):
        engine.step(lambda: next(training.batches), share)
        assert engine.clip.norm is not None, "the norm is asked for"
        found.append(float(engine.clip.norm) * share.n_targets() / max(1.0, n_targets))
        context.progress.update(name, step + 1, n_steps)
    return found


def record_gradients(training: Training, n_steps: int, context: Context, done: int) -> None:
    """Record the squared norm of the mean gradient of each of `n_steps` drawn batches, on rank 0,
    with its number of samples; training is as if they had not run. All ranks must call it.

    Args:
        done: measured steps so far.
    """
    world, recorder, plan, data = context.world, context.recorder, training.plan, training.data
    drawn = DrawnSamples(
        n_samples=plan.n_samples, shares=plan.shares, positions=plan.positions,
        seed=plan.seed + done,
    )  # fmt: skip
    batches = (data.__getitems__(own).ready_for(world.device) for own in drawn.indices(world.rank))
    barrier()
    with recorder.paused(), training.engine.without_updates():
        by_drawn = replace(training, plan=drawn, batches=batches)
        norms = gradient_norms(by_drawn, context, n_steps, f"noise steps after step {done}")
    step = max(0, done - 1)
    for number, norm in enumerate(norms if world.is_first else ()):
        if math.isfinite(norm):  # in fp16 gradients overflow while the loss scale is too large
            n_distinct = drawn.n_distinct(number)
            recorder.sample("gradient_square_norm", norm**2, step=step, n_distinct=n_distinct)

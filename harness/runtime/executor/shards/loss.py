"""Tasks of the loss: of some samples with all classes, or with some classes and no gathered logits.

Cut by classes (Shoeybi et al., "Megatron-LM", 2019, section 3), each device has the logits of its
classes. One all-reduce forward gives every device each row's sum over classes and the logit of its
target; backward needs none. It adds up a row for each device, in which only its own is not zero, so
that the sums over classes are merged without overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.domain.partition import Interval
from harness.runtime.executor.shards.batch_norm import Reduce
from harness.runtime.models.task import IGNORED, Task


class LossPart(nn.Module):
    """The sum over its samples, times the microbatch's factor.

    Args:
        is_zero: another task has the same samples and counts them.
    """

    def __init__(self, task: Task, *, is_zero: bool = False) -> None:
        super().__init__()
        self._sum_loss, self._is_zero = task.sum_loss, is_zero

    def forward(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        found = self._sum_loss(outputs, targets) * weight
        return found * 0 if self._is_zero else found


class CutCrossEntropy(nn.Module):
    """The cross-entropy of samples of whose logits it has some classes; the first of the devices
    has the loss, the others 0.

    Args:
        classes: interval of its classes.
        index: its number among the `n_parts` devices with the same samples.
        reduce: sums a tensor over these devices.
    """

    def __init__(self, classes: Interval, index: int, n_parts: int, reduce: Reduce) -> None:
        super().__init__()
        self._classes, self._index, self._n_parts = classes, index, n_parts
        self._reduce = reduce

    def forward(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        first, _ = self._classes
        logits = outputs.flatten(0, -2)
        apply: Callable[..., Tensor] = _CutCrossEntropy.apply
        parts = self._index, self._n_parts, self._reduce
        return apply(logits, targets.flatten(), first, *parts) * weight


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        index: int,
        n_parts: int,
        reduce: Reduce,
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        is_own = (targets >= first) & (targets < first + logits.shape[1])
        own = (targets - first).where(is_own, 0)[:, None]
        shared = wide.new_zeros(n_parts + 1, len(targets))
        shared[index] = wide.logsumexp(1)
        shared[-1] = wide.gather(1, own)[:, 0].where(is_own, 0)
        shared = reduce(shared)
        whole = shared[:-1].logsumexp(0)
        counted = targets != IGNORED
        ctx.save_for_backward(wide, whole, own, is_own, counted)
        ctx.dtype = logits.dtype
        summed = ((whole - shared[-1]) * counted).sum()
        return summed if index == 0 else torch.zeros_like(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wide, whole, own, is_own, counted = ctx.saved_tensors
        found = (wide - whole[:, None]).exp_()
        found.scatter_add_(1, own, -is_own.to(found.dtype)[:, None])
        found.mul_(counted[:, None]).mul_(gradient)
        return found.to(ctx.dtype), None, None, None, None, None

"""Tasks of the loss: of some samples with all classes, or with some classes and no gathered logits.

Cut by classes (Shoeybi et al., "Megatron-LM", 2019, section 3), each device has the logits of its
classes. One all-reduce forward gives every device each row's sum over classes and the logit of its
target; backward needs none. It adds up a row for each device, in which only its own is not zero, so
that the sums over classes are merged without overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.domain.graph import LOSS
from harness.domain.partition import Interval
from harness.errors import ConfigError, ModelError, first_line
from harness.runtime.executor.shards.batch_norm import Reduce
from harness.runtime.models.own_loss import BatchLossTask
from harness.runtime.models.task import IGNORED, Task

# Of the outputs of some samples, and their labels; returns the sum over the samples.
Metric = Callable[[Any, Any], Any]
# Elements of the outputs that are gathered together for metrics.
_GATHERED = 1 << 26


class MetricSums:
    """Sums metrics over the samples whose loss a device counts in evaluations.

    Attributes:
        metrics: by name.
        is_primed: these metrics have been computed before.
        error: of the first one that failed; the device goes on, because others wait for it.
    """

    def __init__(self, task: Task) -> None:
        self._task, self.is_primed = task, False
        self.metrics: dict[str, Metric] = {}
        self.error: ConfigError | None = None
        self._sums: list[Tensor] = []

    def start(self, metrics: Mapping[str, Metric]) -> None:
        """Begin an evaluation by these metrics.

        Raises:
            ModelError: the model returns nothing but its loss.
            ConfigError: the metrics are no dict, or one has the name of the loss.
        """
        if not isinstance(metrics, Mapping):
            given = type(metrics).__name__
            raise ConfigError(f"metrics is of type {given}: give a dict of functions by name")
        if metrics and isinstance(self._task, BatchLossTask):
            raise ModelError(
                f"{self._task.model._get_name()} computes the loss of the whole batch itself "
                f"({self._task.reason}), so metrics do not get its outputs: load state_dict() into "
                "a whole model, and evaluate that"
            )
        if LOSS in metrics:
            raise ConfigError(f"a metric is named {LOSS!r}, as the loss is: give another name")
        self.is_primed &= self.metrics == metrics
        self.metrics = dict(metrics)
        self._clear()

    def end_priming(self) -> None:
        """Forget the sums of a forward without messages."""
        self.is_primed = True
        self._clear()

    def _clear(self) -> None:
        self.error = None
        self._are_sums: set[str] = set()
        self.take()

    def take(self) -> list[Tensor]:
        """The sums since the last call."""
        found, self._sums = self._sums, [torch.zeros((), dtype=torch.float64)] * len(self.metrics)
        return found

    def check(self) -> None:
        """Raise the error of a metric that failed."""
        if self.error is not None:
            raise self.error

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the metrics of some samples."""
        for at, (name, metric) in enumerate(self.metrics.items()):
            try:
                found = self._of(metric, outputs, targets)
                self._sums[at] = self._sums[at].to(found.device) + found
                if name not in self._are_sums:
                    self._check_sum(name, metric, outputs[:2], targets[:2])
            except Exception as error:
                self.error = self.error or ConfigError(
                    f"metric {name!r} of outputs {tuple(outputs.shape)} and labels "
                    f"{tuple(targets.shape)} fails ({type(error).__name__}: {first_line(error)}): "
                    "let it return one number, the sum over its samples"
                )

    def _of(self, metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
        # A copy, because a metric may write labels, which others and the loss read.
        read = self._task.for_metrics(outputs, targets.clone())
        return torch.as_tensor(metric(*read)).to(torch.float64).reshape(())

    def _check_sum(self, name: str, metric: Metric, *few: Tensor) -> None:
        """Refuse a metric that is no sum, because the same samples twice do not double it."""
        once = float(self._of(metric, *few))
        twice = float(self._of(metric, *(torch.cat([x, x]) for x in few)))
        if abs(twice - 2 * once) > abs(once) / 10:
            raise ValueError(f"it is {once:.4g}, and {twice:.4g} of the same samples twice")
        if once:
            self._are_sums.add(name)


class LossPart(nn.Module):
    """The sum over its samples, times the microbatch's factor.

    Args:
        metrics: added up in evaluation mode, where this device counts the samples.
        is_zero: another task has the same samples and counts them.
    """

    def __init__(self, task: Task, metrics: MetricSums | None, *, is_zero: bool) -> None:
        super().__init__()
        self._sum_loss, self._metrics, self._is_zero = task.sum_loss, metrics, is_zero

    def forward(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        found = self._sum_loss(outputs, targets) * weight
        if self._is_zero:
            return found * 0
        if self._metrics is not None and not self.training:
            self._metrics.add(outputs, targets)
        return found


class CutCrossEntropy(nn.Module):
    """The cross-entropy of samples of whose logits it has some classes; the first of the devices
    has the loss, the others 0.

    Args:
        classes: interval of its classes.
        index: its number among the `n_parts` devices with the same samples.
        reduce: sums a tensor over these devices.
        metrics: added up by the first of them in evaluation mode, of gathered logits.
        n_classes: of all devices.
    """

    def __init__(
        self,
        classes: Interval,
        index: int,
        n_parts: int,
        reduce: Reduce,
        metrics: MetricSums,
        n_classes: int,
    ) -> None:
        super().__init__()
        self._classes, self._index, self._n_parts = classes, index, n_parts
        self._reduce, self._metrics, self._n_classes = reduce, metrics, n_classes

    def forward(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        if not self.training and self._metrics.metrics:
            self._add_metrics(outputs, targets)
        first, _ = self._classes
        logits = outputs.flatten(0, -2)
        apply: Callable[..., Tensor] = _CutCrossEntropy.apply
        parts = self._index, self._n_parts, self._reduce
        return apply(logits, targets.flatten(), first, *parts) * weight

    def _add_metrics(self, outputs: Tensor, targets: Tensor) -> None:
        """Gather the logits of a few samples at a time."""
        n_each = outputs[0].numel() // outputs.shape[-1] * self._n_classes
        n_samples = max(1, _GATHERED // n_each)
        pairs = zip(outputs.split(n_samples), targets.split(n_samples), strict=True)
        for own, labels in pairs:
            whole = own.new_zeros((*own.shape[:-1], self._n_classes))
            whole[..., slice(*self._classes)] = own
            whole = self._reduce(whole)
            if self._index == 0:
                self._metrics.add(whole, labels)


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

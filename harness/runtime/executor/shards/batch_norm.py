"""Batch normalisation of a block, by its own (local) or by all blocks' (global) statistics.

Global statistics need two all-reduces forward and one backward. The forward merges statistics as
Chan, Golub and LeVeque do (Updating formulae and a pairwise algorithm for computing sample
variances, 1979): first the mean, then the squares of centred values, which avoids cancellation.

Check that a strategy changes buffers in forward as often, and in the order, as one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from harness.domain.strategy import Strategy
from harness.errors import WITHOUT_PLAN, ModelError, StrategyError
from harness.runtime.capture.capture import Captured
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.shards.base import Shard, ShardSpec
from harness.runtime.executor.shards.regions import Region

# Sums a tensor over all devices that hold blocks of the same features; may work in place.
Reduce = Callable[[Tensor], Tensor]

_TENSORS = ("weight", "bias", "running_mean", "running_var")


class BatchNormShard(Shard):
    """A block normalised by its own statistics."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, part: ShardSpec, module: _BatchNorm, inward: Region) -> None:
        super().__init__([inward])
        # Off if another task on the same device updates the same statistics.
        self.track_running_stats = True
        self.is_counting = True
        self._eps, self._momentum = module.eps, module.momentum
        for name in _TENSORS:
            self.copy_slice(part, name, part.held(name), (part.output[1],))
        self.copy_slice(part, "num_batches_tracked", part.held("num_batches_tracked"))

    @property
    def is_measuring(self) -> bool:
        """Whether it normalises by the statistics of its input, not by running statistics."""
        return self.training or self.running_mean is None

    def compute(self, x: Tensor) -> Tensor:
        factor = self._count_batch()
        is_tracking = self.track_running_stats or not self.is_measuring
        return F.batch_norm(
            x,
            self.running_mean if is_tracking else None,
            self.running_var if is_tracking else None,
            self.weight,
            self.bias,
            self.is_measuring,
            factor,
            self._eps,
        )

    def _count_batch(self) -> float:
        """Count this batch; return its weight in the running statistics."""
        is_tracking = self.training and self.track_running_stats
        if is_tracking and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1 if self.is_counting else 0)
            if self._momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self._momentum is None else float(self._momentum)


class GlobalBatchNorm(BatchNormShard):
    """A block normalised by the statistics of all blocks.

    Args:
        n_values: values per feature of the whole output, at this microbatch size.
        reduce: called twice in each forward and once in each backward.
    """

    def __init__(
        self, part: ShardSpec, module: _BatchNorm, inward: Region, *, n_values: int, reduce: Reduce
    ) -> None:
        super().__init__(part, module, inward)
        self._n_values, self._reduce = n_values, reduce

    def compute(self, x: Tensor) -> Tensor:
        if not self.is_measuring:
            return super().compute(x)
        if self._n_values < 2:
            raise ModelError(
                f"batch normalisation needs 2 values per feature, it gets {self._n_values}: "
                "raise the batch, or lower the microbatches"
            )
        factor = self._count_batch()
        mean, variance, n_values = merge_statistics(x.detach(), self._reduce)
        self._track(mean, variance * (n_values / (n_values - 1)), factor)
        apply: Callable[..., Tensor] = _Normalise.apply
        return apply(x, self.weight, self.bias, mean, variance, n_values, self._eps, self._reduce)

    def _track(self, mean: Tensor, variance: Tensor, factor: float) -> None:
        is_tracking = self.training and self.track_running_stats
        if is_tracking and self.running_mean is not None and self.running_var is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def merge_statistics(x: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per feature over all devices, and the number of values.

    They have 64 bits for every dtype of `x`, because one number per feature costs little.
    """
    own_variance, own_mean = _statistics(x)
    n_own = x.numel() // x.shape[1]
    sums = reduce(torch.cat([own_mean * n_own, own_mean.new_full((1,), n_own)]))
    mean, n_values = sums[:-1] / sums[-1], sums[-1].clone()
    squares = reduce(n_own * (own_variance + (own_mean - mean).square()))
    return mean, squares / n_values, n_values


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if wide.device.type == "cpu":  # 16 ms, where var_mean takes 57, for (32, 64, 56, 56)
        mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
    else:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(wide, dims, correction=0)
    return variance.double(), mean.double()


class _Normalise(torch.autograd.Function):
    """y = gamma z + beta with z = (x - mean) / sqrt(variance + eps), and with g = dL/dy

    dL/dx = gamma / sqrt(variance + eps) (g - (sum g) / n - z (sum g z) / n)

    by Ioffe and Szegedy (Batch Normalization, 2015); the sums run over all devices. Gradients of
    weight and bias cover this block only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        n_values: Tensor,
        eps: float,
        reduce: Reduce,
    ) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance, n_values)
        ctx.eps, ctx.reduce = eps, reduce
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, n_values = ctx.saved_tensors
        eps, reduce = ctx.eps, ctx.reduce
        # With given statistics, the gradients of gamma and beta are sum g z and sum g.
        gamma = torch.ones_like(mean) if weight is None else weight  # CUDA's refuses None
        unused = mean.new_empty(0)  # CUDA's refuses None for saved statistics
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, gamma, mean, variance, unused, unused, False, eps, [False, True, True]
        )
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = reduce(torch.stack([grad_weight, grad_bias]).double()) / n_values
            scale = (variance.double() + eps).rsqrt()
            scale = scale if weight is None else scale * weight
            first, second = (-sums * scale).to(mean.dtype)
            grad_input = F.batch_norm(x, mean, variance, first, second, eps=eps)
            shape = [1, -1] + [1] * (x.dim() - 2)
            grad_input = grad_input.addcmul_(gradient, scale.to(gradient.dtype).view(shape))
        wanted = ctx.needs_input_grad
        return (
            grad_input,
            grad_weight if wanted[1] else None,
            grad_bias if wanted[2] else None,
            *(None,) * 5,
        )


def make_batch_norm_shard(part: ShardSpec) -> BatchNormShard | None:
    """A batch norm by the block's own statistics."""
    if not isinstance(part.module, _BatchNorm) or len(part.wanted) != 1:
        return None
    return BatchNormShard(part, part.module, part.region(part.output))


def make_batch_norm(part: ShardSpec, reduce: Reduce) -> GlobalBatchNorm | None:
    """Make a batch normalisation with global statistics, for any cut.

    Its input block equals its output block.

    Args:
        reduce: sums over all devices that hold blocks of the same features.

    Returns:
        None for a batch normalisation that is a function.
    """
    if not isinstance(part.module, _BatchNorm):
        return None
    n_values = math.prod(part.sizes) // part.sizes[1]
    shard = GlobalBatchNorm(part, part.module, Region(), n_values=n_values, reduce=reduce)
    return part.in_mode(shard)


def check_writers(captured: Captured, meta: MetaModel, strategy: Strategy) -> None:
    """Check that modules that change buffers in forward, such as spectral norm, run once per step.

    Batch norms are exempt, because the executor updates their statistics correctly.
    """
    writes = meta.at(max(strategy.microbatch_sizes())).writes
    for name, node in captured.nodes.items():
        if node not in writes:
            continue
        plan, n_runs = strategy.operators[name], strategy.n_microbatches
        per_device = max(plan.devices.count(device) for device in plan.devices)
        if n_runs * per_device == 1 and not strategy.stages[plan.stage].recompute:
            continue
        why = f"{n_runs} microbatches" if n_runs > 1 else "recomputation"
        why = why if per_device == 1 else f"{per_device} parts of it on one device"
        raise StrategyError(
            f"operator {name!r} changes its buffer {writes[node]!r} in every forward, which one "
            f"device runs once a step, and strategy {strategy.name!r} more often ({why}): use "
            f"1 microbatch without recomputation, or {WITHOUT_PLAN}"
        )

"""What may be timed in an operator's place: a part of its weights, or another backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from harness.runtime.capture.capture import Captured
from harness.runtime.executor.gradients.deferred import (
    in_place,
    in_place_bytes,
    inputs_only,
    joined_bytes,
)
from harness.runtime.profiling.shards import OperatorShard, operator_shard
from harness.runtime.profiling.stretch import OperatorCall, tensors_in
from harness.workloads.planning.profile_points import Point

# Gives a module whose backward differs; None where it has no such.
Vary = Callable[[nn.Module], nn.Module | None]


def vary(variant: str, *, is_added: bool) -> Vary:
    """By field of a measurement, of BACKWARD_VARIANTS: the gradient of large weights written where
    it stays; that of inputs alone. The module itself by the empty name.

    Args:
        is_added: gradients are, to those of earlier microbatches.
    """
    if variant == "in_place_backward_s":
        return lambda module: in_place(module, is_added=is_added)
    return inputs_only if variant else lambda module: module


def variants(call: OperatorCall, device: torch.device) -> tuple[str, ...]:
    """How else the executor may carry out the backward of a call on this device."""
    module = call.function
    is_fed_back = any(x.requires_grad for x in tensors_in((call.args, call.kwargs)))
    if not isinstance(module, nn.Module) or not is_fed_back:
        return ()
    least = {
        "in_place_backward_s": in_place_bytes(device),
        "input_backward_s": joined_bytes(device),
    }
    return tuple(
        variant
        for variant, n_bytes in least.items()
        if n_bytes < math.inf and vary(variant, is_added=False)(module) is not None
    )


class PointInstead:
    """What is timed in an operator's place: a part of its weights, another backward, or both.

    Made when it is first called, so that few parts are in memory at a time.
    """

    def __init__(self, captured: Captured, point: Point, vary: Vary) -> None:
        self._captured, self._point, self._vary = captured, point, vary
        self._shard: OperatorShard | None = None
        self._module: nn.Module | None = None

    def __call__(self, call: OperatorCall) -> OperatorCall:
        point = self._point
        if point.dim:
            if self._shard is None:
                self._shard = operator_shard(
                    self._captured, point.operator, point.dim, point.size, call
                )
            assert self._shard is not None, "it was cut before"
            call = self._shard.call(call)
        if self._module is None:
            assert isinstance(call.function, nn.Module), "functions have one backward"
            self._module = self._vary(call.function)
        assert self._module is not None, "it was known to vary"
        is_own = self._module is call.function
        return call if is_own else OperatorCall(self._module, call.args, call.kwargs)

    def forget(self) -> None:
        """Let go of gradients that were written into parameters."""
        if self._module is not None:
            self._module.zero_grad(set_to_none=True)

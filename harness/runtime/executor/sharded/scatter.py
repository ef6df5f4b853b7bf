"""Sum gradients of weights to the ranks that own their parts: reduce-scatter, in buckets.

    backward of a microbatch  |--- p5 p4 ---|--- p3 p2 ---|
    bucket 0  (p5 p4)          copied, freed |--- to the owners ---| added to the own parts
    bucket 1  (p3 p2)                                       |--- ... ---|

Each microbatch's gradients are summed after its backward, so that a rank never keeps whole
gradients of more than the buckets that are on their way. Over gloo a reduce-scatter is an
all-to-all and a local sum, because gloo's own is an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.runtime.executor.gradients.sums import Bucket, buckets_of, view_like
from harness.runtime.executor.sharded.owners import Group, SharedSlice, flat
from harness.runtime.ranks.world import World


class ScatterBucket(Bucket):
    """Gradients that are summed to their owners together.

    Attributes:
        flat: gradients of the microbatch, the first holder's parts first; None between two.
        sums: of this rank's own parts, over all devices and microbatches.
    """

    most_on_their_way = 1  # because their memory is not freed yet

    def __init__(self, name: str, slices: Sequence[SharedSlice], here: int, world: World) -> None:
        super().__init__(name, slices[0].piece.name, [one.parameter for one in slices])
        self.slices, self.here = list(slices), here
        self._is_nccl = world.backend == "nccl"
        first = self.slices[0].parameter
        holders = range(len(self.slices[0].devices))
        self.sizes = [sum(one.size(holder) for one in self.slices) for holder in holders]
        self.sums = torch.zeros(self.sizes[here], dtype=first.dtype, device=first.device)
        self._places: dict[nn.Parameter, list[int]] = {one.parameter: [] for one in slices}
        at = 0
        for holder in holders:
            for one in self.slices:
                self._places[one.parameter].append(at)
                at += one.size(holder)
        self._slices = {one.parameter: one for one in slices}
        self._taken: set[nn.Parameter] = set()
        self.flat: Tensor | None = None
        self._received: Tensor | None = None

    def reset(self) -> None:
        self.sums.zero_()

    def take(self, parameter: nn.Parameter) -> None:
        if self.flat is None:
            self.flat = self.sums.new_empty(self.n_elements)
        one, gradient = self._slices[parameter], parameter.grad
        for holder, at in enumerate(self._places[parameter]):
            part = one.parts[holder]
            if part is None:
                continue
            target = self.flat[at : at + one.size(holder)]
            if gradient is not None:
                values = _in_order(part.within(one.piece).take(gradient), parameter)
            if gradient is None and parameter not in self._taken:
                target.zero_()
            elif gradient is not None and parameter in self._taken:
                target.add_(values)
            elif gradient is not None:
                target.copy_(values)
        parameter.grad = None
        self._taken.add(parameter)

    def collect(self) -> None:
        for one in self.slices:
            if one.parameter not in self._taken or one.parameter.grad is not None:
                self.take(one.parameter)
        self._taken.clear()

    def start(self, group: Any) -> Any:
        assert self.flat is not None, "a bucket has parameters"
        packed, self.flat = self.flat, None
        n = self.sizes[self.here]
        if self._is_nccl:
            self._received = packed.new_empty(n)
            parts = list(packed.split(self.sizes))
            return dist.reduce_scatter(self._received, parts, group=group, async_op=True)
        self._received = packed.new_empty(len(self.sizes) * n)
        counts = [n] * len(self.sizes)
        return dist.all_to_all_single(
            self._received, packed, counts, self.sizes, group=group, async_op=True
        )

    @torch.no_grad()
    def finish(self) -> None:
        assert self._received is not None, "its exchange has begun"
        for part in self._received.view(-1, len(self.sums)) if len(self.sums) else ():
            self.sums += part
        self._received = None

    def assign(self) -> None:
        first = self._places[self.slices[0].parameter][self.here]
        for one in self.slices:
            if one.own is not None:
                at = self._places[one.parameter][self.here] - first
                one.own.grad = view_like(one.own, self.sums, at)


def _in_order(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """The elements of a part of a gradient in the order of the parameter's memory."""
    if part.stride() == parameter.stride():
        return flat(part)
    strides = parameter.stride()
    return part.permute(sorted(range(part.dim()), key=lambda dim: -strides[dim])).reshape(-1)


def scatter_buckets(
    shared: Iterable[SharedSlice], bucket_bytes: int, world: World
) -> dict[Group, list[ScatterBucket]]:
    """The buckets of sharded weights, by the devices that hold them."""
    slices = {one.parameter: one for one in shared}
    found: dict[Group, list[ScatterBucket]] = defaultdict(list)
    members = ((one.devices, parameter) for parameter, one in slices.items())
    for number, (devices, chunk) in enumerate(buckets_of(members, bucket_bytes)):
        here, own = devices.index(world.rank), [slices[parameter] for parameter in chunk]
        found[devices].append(ScatterBucket(f"bucket{number}", own, here, world))
    return found

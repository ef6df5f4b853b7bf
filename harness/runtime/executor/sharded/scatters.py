"""Sums of gradients to their owners, by a reduce-scatter, in buckets.

    backward of a microbatch  |--- p5 p4 ---|--- p3 p2 ---|
    bucket 0  (p5 p4)          copied, freed |--- to the owners ---| added to the own parts
    bucket 1  (p3 p2)                                       |--- ... ---|

Sharded gradients are summed after each microbatch's backward, so that a rank never keeps whole
gradients of more than the buckets that are on their way; where only the optimizer's state is
sharded, those of all microbatches are summed after the last one's. Over gloo a reduce-scatter is
messages and a local sum, because gloo's own is an all-reduce, and its all-to-all sends to a rank
only after it has received from it.

Holders on several hosts sum within each host first, then parts between the hosts, which so send
each element once. Groups of holders that each keep the whole slice in parts
(`shard_state.sharing_groups`) sum equal parts with each other, once, at the end of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.reduce_dtype import quantized_bytes
from harness.domain.shard_state import Group
from harness.runtime.devices.precision import reduced
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.sums import Bucket, SumGroups, buckets_of, view_like
from harness.runtime.executor.sharded.owners import SharedSlice, flat
from harness.runtime.executor.transport.groups import scatter_sum
from harness.runtime.ranks.messages import PendingMessages, part_messages, start_messages
from harness.runtime.ranks.quantized_sums import dequantized, quantized, start_all_reduce
from harness.runtime.ranks.world import World

# Of messages in torch's default group, apart from those of activations (`transport.channels`).
_TAG = (1 << 31) - 1


class PartSum:
    """Sums a flat tensor over the ranks of a group, of which each gets a part.

    Args:
        sizes: elements of each rank's part.
        here: this rank's place in the group.

    Attributes:
        n_own: elements of this rank's part.
    """

    def __init__(self, sizes: Sequence[int], here: int, world: World, reduce_dtype: str) -> None:
        self._sizes, self._here, self._reduce_dtype = list(sizes), here, reduce_dtype
        self.n_own = self._sizes[here]
        self._is_nccl = world.backend == "nccl"
        self._is_quantized = False
        self._sent = self._received = torch.empty(0)

    def pack(self, tensor: Tensor) -> None:
        # Kept until `add_to`: the mark at its end makes NCCL's work forget its tensors.
        self._sent = self._received = reduced(tensor, self._reduce_dtype)
        if len(self._sizes) == 1:
            return
        self._is_quantized = self._reduce_dtype == "int8" and tensor.dtype == torch.float32
        if self._is_quantized:
            self._sent = torch.cat([quantized(part) for part in tensor.split(self._sizes)])
        n_received = 1 if self._is_nccl and not self._is_quantized else len(self._sizes)
        self._received = self._sent.new_empty(n_received * self._length(self.n_own))

    def _length(self, n: int) -> int:
        """Elements of the tensor that sends some numbers."""
        return quantized_bytes(n) if self._is_quantized else n

    def start(self, group: Any) -> Any:
        if len(self._sizes) == 1:
            return None
        if self._is_nccl and self._is_quantized:
            works = start_messages(self._messages(group))
            return works[-1] if works else None
        if self._is_nccl:
            received, sent = map(_real_of, (self._received, self._sent))
            if len(set(self._sizes)) == 1:  # a list would be copied into memory that nobody keeps
                return scatter_sum(received, sent, group, is_async=True)
            parts = list(sent.split(self._sizes))
            return dist.reduce_scatter(received, parts, group=group, async_op=True)
        return PendingMessages(start_messages(self._messages(group)))

    def _messages(self, group: Any) -> list[dist.P2POp]:
        """Sends and receives of all ranks' parts but this one's, which is copied."""
        sent = self._sent.split([self._length(size) for size in self._sizes])
        n = self._length(self.n_own)
        received = [self._received[k * n : (k + 1) * n] for k in range(len(sent))]
        received[self._here].copy_(sent[self._here])
        return part_messages(received, sent, self._here, group, 0 if self._is_nccl else _TAG)

    def add_to(self, target: Tensor) -> None:
        """Add this rank's part of the sum."""
        for part in self._received.view(-1, self._length(len(target))) if len(target) else ():
            target += dequantized(part, len(target)) if self._is_quantized else part
        self._sent = self._received = torch.empty(0)


class ScatterBucket(Bucket):
    """Gradients that are summed to their owners together.

    Args:
        nodes: numbers of the holders of each node, equally many, where gradients are summed within
            nodes and then between them; else all of one.

    Attributes:
        flat: gradients of the microbatch, by holders; None between two.
        sums: of this rank's own parts, over all devices and microbatches.
    """

    most_on_their_way = 1  # because their memory is not freed yet

    def __init__(
        self,
        name: str,
        slices: Sequence[SharedSlice],
        nodes: Sequence[Group],
        world: World,
        reduce_dtype: str = "fp32",
    ) -> None:
        parameters = [one.parameter for one in slices]
        super().__init__(name, slices[0].piece.name, parameters, reduce_dtype)
        self.slices, here = list(slices), slices[0].here
        self.n_parts, self.scatters_outer = len(nodes[0]), len(nodes) > 1
        first = self.slices[0].parameter
        columns = list(zip(*nodes, strict=True))
        own = next(column for column in columns if here in column)
        sizes = {holder: sum(one.size(holder) for one in slices) for row in nodes for holder in row}
        self.sums = first.data.new_zeros(sizes[here])
        # Sums within the node, of all parts of `own`; between the sums of a microbatch.
        self._column: Tensor | None = None
        self._places: dict[nn.Parameter, dict[int, int]] = {one.parameter: {} for one in slices}
        at = 0
        for holder in (holder for column in columns for holder in column):
            for one in self.slices:
                self._places[one.parameter][holder] = at
                at += one.size(holder)
        self._slices = {one.parameter: one for one in slices}
        self._taken: set[nn.Parameter] = set()
        self.flat: Tensor | None = None
        each = [sum(sizes[holder] for holder in column) for column in columns]
        self._inner = PartSum(each, columns.index(own), world, reduce_dtype)
        parts = [sizes[holder] for holder in own]
        self._outer = PartSum(parts, own.index(here), world, reduce_dtype)
        self._sent = self.sums

    def reset(self) -> None:
        self.sums.zero_()

    def take(self, parameter: nn.Parameter) -> None:
        if self.flat is None:
            self.flat = self.sums.new_empty(self.n_elements)
        one, gradient = self._slices[parameter], parameter.grad
        for holder, at in self._places[parameter].items():
            part = one.parts[holder]
            if part is None:
                continue
            target = self.flat[at : at + one.size(holder)]
            if gradient is not None:
                write = target.add_ if parameter in self._taken else target.copy_
                write(_in_order(part.within(one.piece).take(gradient), parameter))
            elif parameter not in self._taken:
                target.zero_()
        parameter.grad = None
        self._taken.add(parameter)

    def collect(self) -> None:
        for one in self.slices:
            if one.parameter not in self._taken or one.parameter.grad is not None:
                self.take(one.parameter)
        self._taken.clear()

    def pack(self) -> None:
        assert self.flat is not None, "a bucket has parameters"
        self._inner.pack(self.flat)
        self.flat = None

    def start(self, group: Any) -> Any:
        return self._inner.start(group)

    @torch.no_grad()
    def finish(self) -> None:
        if self.scatters_outer:
            self._column = self.sums.new_zeros(self._inner.n_own)
        self._inner.add_to(self.sums if self._column is None else self._column)

    def start_outer(self, group: Any) -> Any:
        if self._column is not None:
            self._outer.pack(self._column)
            self._column = None
            return self._outer.start(group)
        self._sent = reduced(self.sums, self.reduce_dtype)
        return start_all_reduce(self._sent, self.reduce_dtype, group)

    @torch.no_grad()
    def finish_outer(self) -> None:
        if self.scatters_outer:
            self._outer.add_to(self.sums)
        elif self._sent is not self.sums:
            self.sums.copy_(self._sent)
        self._sent = self.sums

    def assign(self) -> None:
        here = self.slices[0].here
        first = self._places[self.slices[0].parameter][here]
        for one in self.slices:
            if one.own is not None:
                at = self._places[one.parameter][here] - first
                one.own.grad = view_like(one.own, self.sums, at)


def _real_of(tensor: Tensor) -> Tensor:
    """A view with real numbers, because NCCL knows no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _in_order(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """The elements of a part of a gradient in the order of the parameter's memory."""
    if part.stride() == parameter.stride():
        return flat(part)
    strides = parameter.stride()
    return part.permute(sorted(range(part.dim()), key=lambda dim: -strides[dim])).reshape(-1)


def scatter_buckets(
    shared: Iterable[SharedSlice],
    holders_of: Callable[[WeightSlice], Group],
    groups: Mapping[Group, SumGroups],
    bucket_bytes: int,
    world: World,
    reduce_dtype: str,
) -> Mapping[Group, Sequence[Bucket]]:
    """The buckets of sharded weights, by all devices that hold them."""
    slices = {one.parameter: one for one in shared}
    found: dict[Group, list[ScatterBucket]] = defaultdict(list)
    members = ((holders_of(one.piece), parameter) for parameter, one in slices.items())
    for number, (devices, chunk) in enumerate(buckets_of(members, bucket_bytes)):
        own = [slices[parameter] for parameter in chunk]
        nodes = [tuple(map(own[0].devices.index, node)) for node in groups[devices].nodes]
        bucket = ScatterBucket(f"bucket{number}", own, nodes, world, reduce_dtype)
        found[devices].append(bucket)
    return found

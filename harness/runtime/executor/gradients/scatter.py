"""Sum gradients of weights to the ranks that own their parts: reduce-scatter, in buckets.

    backward of a microbatch  |--- p5 p4 ---|--- p3 p2 ---|
    bucket 0  (p5 p4)          copied, freed |--- to the owners ---| added to the own parts
    bucket 1  (p3 p2)                                       |--- ... ---|

Each microbatch's gradients are summed after its backward, so that a rank never keeps whole
gradients of more than the buckets that are on their way. Over gloo a reduce-scatter is an
all-to-all and a local sum, because gloo's own is an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import PeerError
from harness.measure.recorder import Recorder
from harness.runtime.engines.completion_stream import CompletionStream
from harness.runtime.executor.gradients.sums import bucketed, view_like, with_end
from harness.runtime.executor.state.owners import Group, SharedSlice, flat
from harness.runtime.ranks.failures import gist
from harness.runtime.ranks.world import World

# Buckets of one set of devices on their way at once: their memory is not freed yet.
_MOST_ON_THEIR_WAY = 1


class _ScatterBucket:
    """Gradients that are summed together, and the sums of this rank's own parts.

    Attributes:
        flat: gradients of the microbatch, the first holder's parts first; None between two.
        sums: of this rank's own parts, over all devices and microbatches.
    """

    def __init__(self, name: str, slices: Sequence[SharedSlice], here: int) -> None:
        self.name, self.slices, self.here = name, list(slices), here
        first = self.slices[0].parameter
        holders = range(len(self.slices[0].devices))
        self.sizes = [sum(one.size(holder) for one in self.slices) for holder in holders]
        self.sums = torch.zeros(self.sizes[here], dtype=first.dtype, device=first.device)
        self.n_bytes = sum(self.sizes) * first.element_size()
        self._places: dict[nn.Parameter, list[int]] = {one.parameter: [] for one in slices}
        at = 0
        for holder in holders:
            for one in self.slices:
                self._places[one.parameter].append(at)
                at += one.size(holder)
        self._slices = {one.parameter: one for one in slices}
        self._taken: set[nn.Parameter] = set()
        self.flat: Tensor | None = None
        self.work: Any = None
        self.received: Tensor | None = None

    def take(self, parameter: nn.Parameter) -> None:
        """Move one gradient into the buffer while it is in the cache."""
        if self.flat is None:
            self.flat = self.sums.new_empty(sum(self.sizes))
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

    def collect(self) -> Tensor:
        """The buffer with all gradients; zeros for parameters without one."""
        for one in self.slices:
            if one.parameter not in self._taken or one.parameter.grad is not None:
                self.take(one.parameter)
        assert self.flat is not None, "a bucket has parameters"
        flat, self.flat = self.flat, None
        self._taken.clear()
        return flat

    def assign(self) -> None:
        """Let the own parameters refer to their sums."""
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


class GradientScatter:
    """Sums gradients to the owners of their parts; each microbatch is a round.

    Args:
        uses: for each round, the additions of its backward to each gradient (`count_uses`).
        groups: process groups by their devices.
    """

    def __init__(
        self,
        world: World,
        shared: Sequence[SharedSlice],
        groups: Mapping[Group, Any],
        uses: Sequence[Mapping[nn.Parameter, int]],
        recorder: Recorder,
        bucket_bytes: int,
    ) -> None:
        self._world, self._groups, self._uses, self._recorder = world, groups, uses, recorder
        self._is_nccl = world.backend == "nccl"
        by_parameter = {one.parameter: one for one in shared}
        members: dict[tuple[Group, torch.dtype], list[nn.Parameter]] = defaultdict(list)
        for one in shared:
            members[one.devices, one.parameter.dtype].append(one.parameter)
        self._queues: dict[Group, list[_ScatterBucket]] = {}
        self._bucket_of: dict[nn.Parameter, tuple[Group, _ScatterBucket]] = {}
        self.n_buckets = 0
        for (devices, _), parameters in members.items():
            for chunk in bucketed(parameters[::-1], bucket_bytes):
                slices = [by_parameter[parameter] for parameter in chunk]
                name = f"bucket{self.n_buckets}"
                bucket = _ScatterBucket(name, slices, devices.index(world.rank))
                self._queues.setdefault(devices, []).append(bucket)
                self._bucket_of |= dict.fromkeys(chunk, (devices, bucket))
                self.n_buckets += 1
        self._completions = {devices: CompletionStream(world) for devices in self._queues}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self.reached)
        self._n_left: dict[nn.Parameter, int] = {}
        self._round_of: dict[nn.Parameter, int] = {}
        self._waiting: dict[tuple[int, _ScatterBucket], int] = {}
        self._next: dict[Group, int] = {}
        self._under_way: dict[Group, deque[_ScatterBucket]] = {}
        self._is_muted = False

    def start_step(self, *, is_muted: bool = False) -> None:
        """Reset all sums.

        Args:
            is_muted: without communication.
        """
        self._is_muted = is_muted
        self._round_of, self._n_left = {}, dict.fromkeys(self._bucket_of, 0)
        for parameter in self._bucket_of:
            self._begin_round(parameter, 0)
        self._next = dict.fromkeys(self._queues, 0)
        self._under_way = {devices: deque() for devices in self._queues}
        self._waiting = {
            (number, bucket): sum(uses.get(one.parameter, 0) > 0 for one in bucket.slices)
            for number, uses in enumerate(self._uses)
            for queue in self._queues.values()
            for bucket in queue
        }
        for queue in self._queues.values():
            for bucket in queue:
                bucket.sums.zero_()

    def reached(self, parameter: nn.Parameter) -> None:
        """Count an addition to a gradient; after a round's last, its bucket may start."""
        if parameter not in self._n_left:
            return
        self._n_left[parameter] -= 1
        if self._n_left[parameter] == 0:
            devices, bucket = self._bucket_of[parameter]
            number = self._round_of[parameter]
            bucket.take(parameter)
            self._waiting[number, bucket] -= 1
            self._begin_round(parameter, number + 1)
            self._start_ready(devices)

    def _begin_round(self, parameter: nn.Parameter, number: int) -> None:
        """Begin the next round whose backward adds to a gradient."""
        while number < len(self._uses) and not self._uses[number].get(parameter):
            number += 1
        self._round_of[parameter] = number
        if number < len(self._uses):
            self._n_left[parameter] = self._uses[number][parameter]

    def _start_ready(self, devices: Group, *, is_forced: bool = False) -> None:
        """Start buckets in the order that all devices share: round by round, as in the queue."""
        queue = self._queues[devices]
        while self._next[devices] < len(queue) * len(self._uses):
            number, at = divmod(self._next[devices], len(queue))
            if self._waiting[number, queue[at]] > 0 and not is_forced:
                return
            if not is_forced and not any(
                self._uses[number].get(one.parameter) for one in queue[at].slices
            ):
                return  # no backward reaches it
            self._start(devices, queue[at])
            self._next[devices] += 1

    def _start(self, devices: Group, bucket: _ScatterBucket) -> None:
        under_way = self._under_way[devices]
        while bucket in under_way or len(under_way) >= _MOST_ON_THEIR_WAY:
            self._finish(devices, under_way.popleft())
        packed = bucket.collect()
        if self._is_muted:
            return
        clock, recorder = self._recorder.clock, self._recorder
        start = clock.mark()
        group, n = self._groups[devices], bucket.sizes[bucket.here]
        if self._is_nccl:
            bucket.received = packed.new_empty(n)
            parts = list(packed.split(bucket.sizes))
            work = dist.reduce_scatter(bucket.received, parts, group=group, async_op=True)
        else:
            bucket.received = packed.new_empty(len(devices) * n)
            counts = [n] * len(devices)
            work = dist.all_to_all_single(
                bucket.received, packed, counts, bucket.sizes, group=group, async_op=True
            )

        def note_end() -> None:
            end = self._completions[devices].mark(work, clock)
            n_bytes = bucket.n_bytes
            recorder.add_marks("communication", start, end, name=bucket.name, n_bytes=n_bytes)

        bucket.work = with_end(work, note_end, is_nccl=self._is_nccl)
        under_way.append(bucket)

    @torch.no_grad()
    def _finish(self, devices: Group, bucket: _ScatterBucket) -> None:
        try:
            bucket.work.wait()
        except RuntimeError as error:
            raise PeerError(
                f"the sum of the gradients of {bucket.slices[0].piece.name} ({bucket.name}) to "
                f"their owners among ranks {list(devices)} failed ({gist(error)}): one of them "
                "died or hangs, look at their logs",
                devices,
            ) from error
        assert bucket.received is not None, "its exchange has begun"
        for part in bucket.received.view(-1, len(bucket.sums)) if len(bucket.sums) else ():
            bucket.sums += part
        bucket.received = bucket.work = None

    def finish(self) -> None:
        """Start the remaining buckets, wait for all, and give the sums to the own parameters; all
        devices must call it.

        Raises:
            PeerError: another device died or hangs; NCCL ends this process instead.
        """
        for devices, queue in self._queues.items():
            self._start_ready(devices, is_forced=True)
            under_way = self._under_way[devices]
            while under_way:
                self._finish(devices, under_way.popleft())
            for bucket in queue:
                bucket.assign()

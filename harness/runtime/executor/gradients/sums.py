"""Sum the gradients of weights over the devices that hold them, in buckets, beside backward.

    backward  |--- p5 p4 ---|--- p3 p2 ---|-- p1 --|
    bucket 0  (p5 p4)        |--- sum over devices ---|
    bucket 1  (p3 p2)                      |--- sum ---|

A bucket holds gradients of one set of devices in the order of backward. Its collective starts when
its gradients are complete and all earlier buckets of the same devices have started, so that every
device of the set starts them in the same order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.domain.routes import first_bucket_bytes
from harness.domain.shard_state import Group
from harness.measure.recorder import Recorder
from harness.runtime.devices.precision import reduced, sent_bytes
from harness.runtime.engines.engine import CollectiveSpans
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.weight_gradients import GradientBuffers
from harness.runtime.ranks.failures import blaming_peers
from harness.runtime.ranks.quantized_sums import dequantized, quantized, start_all_reduce
from harness.runtime.ranks.world import World


class SumGroups(NamedTuple):
    """This rank's process groups for gradients of slices with some holders.

    Attributes:
        inner: of each sum; None if only this rank shares the slices.
        outer: between nodes, of the sums of equal parts; None if no other rank has them.
        nodes: the ranks that share the slices, by node where sums within nodes come first.
    """

    inner: Any
    outer: Any = None
    nodes: Sequence[Group] = ()


class Bucket(ABC):
    """Gradients that are summed together.

    Attributes:
        label: names its weights.
        n_parts: ranks that each get a part of the inner sum; 1: all get the whole.
        scatters_outer: each sum has an outer one, of which ranks get parts; else a step has one.
        most_on_their_way: buckets of one set of devices that may be on their way at once.
        n_bytes: as they are sent.
    """

    most_on_their_way = math.inf
    n_parts = 1
    scatters_outer = False

    def __init__(
        self, name: str, label: str, parameters: Sequence[nn.Parameter], reduce_dtype: str
    ) -> None:
        self.name, self.label, self.parameters = name, label, list(parameters)
        self.reduce_dtype = reduce_dtype
        self.n_elements = sum(parameter.numel() for parameter in self.parameters)
        self.n_bytes = sum(sent_bytes(parameter, reduce_dtype) for parameter in self.parameters)

    def reset(self) -> None:  # noqa: B027 (only some buckets keep sums)
        """Begin a step."""

    @abstractmethod
    def take(self, parameter: nn.Parameter) -> None:
        """Move one gradient into the bucket while it is in the cache, and free its old memory."""

    @abstractmethod
    def collect(self) -> None:
        """Take the remaining gradients; zeros for parameters without one."""

    @abstractmethod
    def pack(self) -> None:
        """Make what the collective sends and receives; called before `start`."""

    @abstractmethod
    def start(self, group: Any) -> Any:
        """Start the collective and return its work; all devices must call it."""

    def finish(self) -> None:  # noqa: B027
        """Keep the result of the collective."""

    def start_outer(self, group: Any) -> Any:
        """Start to sum the sums of equal parts, where `SumGroups.outer` is given."""
        raise AssertionError(f"{self.name} has no parts")

    def finish_outer(self) -> None:  # noqa: B027
        """Keep the result of `start_outer`."""

    def assign(self) -> None:  # noqa: B027
        """End a step: let parameters refer to their sums."""


class SumBucket(Bucket):
    """Gradients that are all-reduced, in place unless they are rounded."""

    def __init__(
        self,
        name: str,
        label: str,
        parameters: Sequence[nn.Parameter],
        reduce_dtype: str = "fp32",
    ) -> None:
        super().__init__(name, label, parameters, reduce_dtype)
        first = self.parameters[0]
        self.flat = torch.zeros(self.n_elements, dtype=first.dtype, device=first.device)
        self._sent = self.flat
        self.views: dict[nn.Parameter, Tensor] = {}
        at = 0
        for parameter in self.parameters:
            self.views[parameter] = view_like(parameter, self.flat, at)
            at += parameter.numel()

    def take(self, parameter: nn.Parameter) -> None:
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def collect(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not self.views[parameter]:
                self.take(parameter)

    def pack(self) -> None:
        self._sent = reduced(self.flat, self.reduce_dtype)

    def start(self, group: Any) -> Any:
        return start_all_reduce(self._sent, self.reduce_dtype, group)

    def finish(self) -> None:
        if self._sent is not self.flat:
            self.flat.copy_(self._sent)
        self._sent = self.flat


def sum_buckets(
    parameters: Mapping[WeightSlice, nn.Parameter],
    devices_of: Callable[[WeightSlice], Group],
    bucket_bytes: int,
    buffers: GradientBuffers,
    reduce_dtype: str,
) -> Mapping[Group, Sequence[Bucket]]:
    """The buckets of replicated weights, by the devices that hold them.

    Args:
        parameters: of this device, in the model's order.
        buffers: receives the views of the buckets, so that gradients can be written into them.
    """
    queues: dict[Group, list[SumBucket]] = defaultdict(list)
    names = {parameter: piece.name for piece, parameter in parameters.items()}
    members = ((devices_of(piece), parameter) for piece, parameter in parameters.items())
    for number, (devices, chunk) in enumerate(buckets_of(members, bucket_bytes)):
        label = " to ".join(dict.fromkeys((names[chunk[0]], names[chunk[-1]])))
        bucket = SumBucket(f"bucket{number}", label, chunk, reduce_dtype)
        buffers.update(bucket.views)
        queues[devices].append(bucket)
    return queues


def buckets_of(
    parameters: Iterable[tuple[Group, nn.Parameter]], bucket_bytes: int
) -> Iterator[tuple[Group, list[nn.Parameter]]]:
    """The parameters of each bucket, for those that several devices hold; a bucket has one set of
    devices and one dtype."""
    shared: dict[tuple[Group, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for devices, parameter in parameters:
        if len(devices) > 1:
            shared[devices, parameter.dtype].append(parameter)
    for (devices, _), members in shared.items():
        for chunk in bucketed(members[::-1], bucket_bytes):
            yield devices, chunk


def view_like(parameter: nn.Parameter, flat: Tensor, at: int) -> Tensor:
    """A view of a buffer with a parameter's strides, as fused optimizers require of gradients.

    Strides differ from the order of dims for channels_last and for transposed weights.
    """
    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    if is_dense:  # without gaps or overlaps, whose strides `empty_like` keeps
        return flat.as_strided(parameter.shape, parameter.stride(), at)
    return flat[at : at + parameter.numel()].view_as(parameter)


class GradientSync:
    """Sums gradients over the devices that hold the same weights.

    Args:
        queues: buckets by their devices, in the order of backward.
        groups: by the same devices.
        rounds: for each sum of all buckets, the additions of backward to each gradient before it
            (`count_rounds`). All-reduces have one round a step, sums to owners one a microbatch.
        is_blocking: backward waits where no further bucket may be on its way. Otherwise the bucket
            starts later, with what backward has added until then.

    Attributes:
        n_sums: sums that it starts.
    """

    def __init__(
        self,
        world: World,
        queues: Mapping[Group, Sequence[Bucket]],
        groups: Mapping[Group, SumGroups],
        rounds: Sequence[Mapping[nn.Parameter, int]],
        recorder: Recorder,
        *,
        is_blocking: bool = True,
    ) -> None:
        self._queues, self._groups, self._rounds = queues, groups, rounds
        self._is_blocking = is_blocking
        self._is_nccl = world.backend == "nccl"
        self._bucket_of = {
            parameter: (devices, bucket)
            for devices, queue in queues.items()
            for bucket in queue
            for parameter in bucket.parameters
        }
        self.n_sums = 0
        for devices, queue in queues.items():
            inner, outer = (group is not None for group in groups[devices][:2])
            for bucket in queue:
                n_outer = len(rounds) if bucket.scatters_outer else 1
                self.n_sums += len(rounds) * inner + n_outer * outer
        # Gradients that each bucket waits for, by (round, bucket).
        self._n_used = {
            (number, bucket): sum(uses.get(parameter, 0) > 0 for parameter in bucket.parameters)
            for number, uses in enumerate(rounds)
            for queue in queues.values()
            for bucket in queue
        }
        self._inner = {devices: CollectiveSpans(world, recorder) for devices in queues}
        self._outer = {devices: CollectiveSpans(world, recorder) for devices in queues}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self.reached)
        self._n_waiting: dict[tuple[int, Bucket], int] = {}
        self._n_left: dict[nn.Parameter, int] = {}
        self._round_of: dict[nn.Parameter, int] = {}
        self._n_started: dict[Group, int] = {}
        self._under_way: dict[Group, deque[tuple[Bucket, Any]]] = {}
        self._n_finished: dict[Group, int] = {}
        self._outer_sums: dict[Bucket, tuple[Group, Any]] = {}
        self._is_muted = False

    def start_step(self, *, is_muted: bool = False) -> None:
        """Reset all buckets.

        Args:
            is_muted: fill the buckets without communication.
        """
        self._is_muted = is_muted
        self._n_waiting = dict(self._n_used)
        self._n_left = dict.fromkeys(self._bucket_of, 0)
        for parameter in self._bucket_of:
            self._begin_round(parameter, 0)
        self._n_started = dict.fromkeys(self._queues, 0)
        self._n_finished = dict.fromkeys(self._queues, 0)
        self._under_way = {devices: deque() for devices in self._queues}
        for queue in self._queues.values():
            for bucket in queue:
                bucket.reset()

    def reached(self, parameter: nn.Parameter) -> None:
        """Count an addition to a gradient; after a round's last, its bucket may start."""
        if parameter not in self._n_left:
            return
        self._n_left[parameter] -= 1
        devices, bucket = self._bucket_of[parameter]
        if self._n_left[parameter] == 0 or isinstance(bucket, SumBucket):  # to which others add
            bucket.take(parameter)
        if self._n_left[parameter] == 0:
            number = self._round_of[parameter]
            self._n_waiting[number, bucket] -= 1
            self._begin_round(parameter, number + 1)
            self._start_ready(devices)

    def _begin_round(self, parameter: nn.Parameter, number: int) -> None:
        """Begin the next round whose backward adds to a gradient."""
        while number < len(self._rounds) and not self._rounds[number].get(parameter):
            number += 1
        self._round_of[parameter] = number
        if number < len(self._rounds):
            self._n_left[parameter] = self._rounds[number][parameter]

    def _start_ready(self, devices: Group, *, is_forced: bool = False) -> None:
        """Start buckets in the order that all devices share: round by round, as in the queue."""
        queue = self._queues[devices]
        while self._n_started[devices] < len(queue) * len(self._rounds):
            number, at = divmod(self._n_started[devices], len(queue))
            key = number, queue[at]
            is_complete = self._n_used[key] > 0 and self._n_waiting[key] == 0
            if not (is_complete or is_forced):
                return
            if not (self._is_blocking or is_forced or self._has_room(devices, queue[at])):
                return
            self._start(devices, queue[at])
            self._n_started[devices] += 1

    def _has_room(self, devices: Group, bucket: Bucket) -> bool:
        """Whether one more bucket may be on its way, now that some may have arrived."""
        under_way = self._under_way[devices]
        while under_way:
            work = under_way[0][1]
            if work and not (work.is_completed() if self._is_nccl else work.done()):
                break
            self._finish(devices)
        return len(under_way) < bucket.most_on_their_way

    def _start(self, devices: Group, bucket: Bucket) -> None:
        under_way = self._under_way[devices]
        while len(under_way) >= bucket.most_on_their_way:
            self._finish(devices)
        bucket.collect()
        if self._is_muted:
            return
        bucket.pack()
        begin = partial(bucket.start, self._groups[devices].inner)
        spans = self._inner[devices]
        under_way.append((bucket, spans.start(begin, bucket.name, bucket.n_bytes)))

    def _finish(self, devices: Group) -> None:
        """Wait for the first bucket of some devices that is on its way, and start its outer
        sum."""
        bucket, work = self._under_way[devices].popleft()
        self._wait(devices, bucket, work)
        self._finish_outer(bucket)
        bucket.finish()
        self._n_finished[devices] += 1
        outer, queue = self._groups[devices].outer, self._queues[devices]
        is_last = self._n_finished[devices] > len(queue) * (len(self._rounds) - 1)
        if outer is not None and (is_last or bucket.scatters_outer):
            name, n_bytes = f"{bucket.name} between nodes", bucket.n_bytes // bucket.n_parts
            work = self._outer[devices].start(partial(bucket.start_outer, outer), name, n_bytes)
            self._outer_sums[bucket] = devices, work

    def _finish_outer(self, bucket: Bucket) -> None:
        """Wait for a bucket's outer sum if one is on its way."""
        if bucket in self._outer_sums:
            devices, work = self._outer_sums.pop(bucket)
            self._wait(devices, bucket, work)
            bucket.finish_outer()

    def _wait(self, devices: Group, bucket: Bucket, work: Any) -> None:
        failure = f"the sum of the gradients of {bucket.label} over ranks {list(devices)} failed"
        with blaming_peers(failure, devices):
            if work is not None:
                work.wait()

    def prime(self) -> None:
        """After a muted step, run what it has left out, but for communication."""
        for bucket in (bucket for queue in self._queues.values() for bucket in queue):
            bucket.pack()
            bucket.finish()
            if bucket.reduce_dtype == "int8":
                dequantized(quantized(torch.zeros(1, device=bucket.parameters[0].device)), 1)

    def finish(self) -> None:
        """Start the remaining buckets and wait for all; all devices must call it.

        Raises:
            PeerError: another device died or hangs; NCCL ends this process instead.
        """
        for devices in self._queues:
            self._start_ready(devices, is_forced=True)
        for devices in self._queues:
            while self._under_way[devices]:
                self._finish(devices)
        for bucket in list(self._outer_sums):
            self._finish_outer(bucket)
        for bucket in (bucket for queue in self._queues.values() for bucket in queue):
            bucket.assign()


def bucketed(parameters: Sequence[nn.Parameter], n_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters, in the order of backward; a bucket ends when it reaches its size."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room <= 0:
            room = n_bytes if buckets else first_bucket_bytes(n_bytes)
            buckets.append([])
        buckets[-1].append(parameter)
        room -= parameter.numel() * parameter.element_size()
    return buckets

"""All-reduce the gradients of replicated weights, in buckets, overlapped with backward.

    backward  |--- p5 p4 ---|--- p3 p2 ---|-- p1 --|
    bucket 0  (p5 p4)        |--- sum over devices ---|
    bucket 1  (p3 p2)                      |--- sum ---|

A bucket holds gradients of one set of devices in the order of backward. Its all-reduce starts when
its gradients are complete and all earlier buckets of the same devices have started, so that every
device of the set starts them in the same order.

Gradient hooks of parameters, run once per step on the summed gradient.

Autograd would run them separately on the gradient of each microbatch and device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.sharding import first_bucket_bytes
from harness.errors import PeerError
from harness.measure.recorder import Recorder
from harness.runtime.engines.completion_stream import CompletionStream
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.weight_gradients import GradientBuffers
from harness.runtime.ranks.failures import gist
from harness.runtime.ranks.world import World

Hook = Callable[[Any], Any]


class ParameterHooks:
    """Removes the hooks of a model's parameters, and runs them when gradients are complete.

    Operators that use such a parameter are never cut along the parameter's dims.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, list[Hook]] = {}
        self._after: dict[str, list[Hook]] = {}
        for name, parameter in model.named_parameters():
            self._before[name] = _take_hooks(parameter._backward_hooks)
            self._after[name] = _take_hooks(parameter._post_accumulate_grad_hooks)

    def first(self) -> str | None:
        """The name of a parameter with a hook; None if there is none."""
        return next(
            (name for name in self._before if self._before[name] or self._after[name]), None
        )

    @torch.no_grad()
    def run(self, parameters: Mapping[WeightSlice, nn.Parameter]) -> None:
        """Run the hooks of each parameter; hooks that may replace the gradient come first."""
        for piece, parameter in parameters.items():
            if parameter.grad is None:
                continue
            for hook in self._before.get(piece.name, ()):
                replaced = hook(parameter.grad)
                if replaced is not None and replaced is not parameter.grad:
                    parameter.grad.copy_(replaced)  # in place, because buckets refer to it
            for hook in self._after.get(piece.name, ()):
                hook(parameter)


def _take_hooks(hooks: Any) -> list[Hook]:
    found = list(hooks.values()) if hooks else []
    if hooks:
        hooks.clear()
    return found


Group = tuple[int, ...]


class _Bucket:
    """Gradients that are all-reduced together."""

    def __init__(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        self.name, self.parameters = name, list(parameters)
        first = self.parameters[0]
        n = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(n, dtype=first.dtype, device=first.device)
        self.views: dict[nn.Parameter, Tensor] = {}
        at = 0
        for parameter in self.parameters:
            self.views[parameter] = view_like(parameter, self.flat, at)
            at += parameter.numel()
        self.n_missing = 0
        self.work: Any = None

    def take(self, parameter: nn.Parameter) -> None:
        """Copy one gradient into the buffer while it is in the cache, and free its old memory."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def collect(self) -> None:
        """Copy the remaining gradients into the buffer; zeros for parameters without one."""
        for parameter in self.parameters:
            if parameter.grad is not self.views[parameter]:
                self.take(parameter)


def view_like(parameter: nn.Parameter, flat: Tensor, at: int) -> Tensor:
    """A view of a buffer with a parameter's strides, as fused optimizers require of gradients.

    Strides differ from the order of dims for channels_last.
    """
    orders = (torch.contiguous_format, torch.channels_last)
    if parameter.dim() == 4 and any(parameter.is_contiguous(memory_format=o) for o in orders):
        return flat.as_strided(parameter.shape, parameter.stride(), at)
    return flat[at : at + parameter.numel()].view_as(parameter)


class GradientSync:
    """All-reduces gradients over the devices that hold the same weights.

    Args:
        parameters: (name, parameter, devices that hold it) of this device, in the model's order.
        groups: process groups by their devices.
        n_uses: additions of backward to each gradient per step (`count_uses`).
        buffers: receives the views of the buckets, so that gradients can be written into them.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, nn.Parameter, Group]],
        groups: Mapping[Group, Any],
        n_uses: Mapping[nn.Parameter, int],
        recorder: Recorder,
        bucket_bytes: int,
        buffers: GradientBuffers,
    ) -> None:
        self._recorder, self._groups, self._n_uses = recorder, groups, n_uses
        self._is_nccl = world.backend == "nccl"
        self._queues: dict[Group, list[_Bucket]] = {}
        shared: dict[tuple[Group, torch.dtype], list[nn.Parameter]] = defaultdict(list)
        self._name_of = {parameter: name for name, parameter, _ in parameters}
        for _, parameter, devices in parameters:
            if len(devices) > 1:
                shared[devices, parameter.dtype].append(parameter)
        self._bucket_of: dict[nn.Parameter, tuple[Group, _Bucket]] = {}
        n_made = 0
        for (devices, _), members in shared.items():
            for chunk in bucketed(members[::-1], bucket_bytes):
                bucket = _Bucket(f"bucket{n_made}", chunk)
                n_made += 1
                self._queues.setdefault(devices, []).append(bucket)
                for parameter in chunk:
                    self._bucket_of[parameter] = devices, bucket
                    buffers.assign(parameter, bucket.views[parameter])
        self._completions = {devices: CompletionStream(world) for devices in self._queues}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self.reached)
        self._n_left: dict[nn.Parameter, int] = {}
        self._next: dict[Group, int] = {}
        self._is_muted = False
        self.n_buckets = n_made

    def start_step(self, *, is_muted: bool = False) -> None:
        """Reset all buckets.

        Args:
            is_muted: fill the buckets without all-reduces.
        """
        self._is_muted = is_muted
        self._n_left = {p: self._n_uses.get(p, 0) for p in self._bucket_of}
        for devices, queue in self._queues.items():
            self._next[devices] = 0
            for bucket in queue:
                bucket.n_missing = len(bucket.parameters)
                bucket.work = None

    def reached(self, parameter: nn.Parameter) -> None:
        """Count an addition to a gradient; after the last, its bucket may start."""
        if parameter not in self._n_left:
            return
        self._n_left[parameter] -= 1
        if self._n_left[parameter] == 0:
            devices, bucket = self._bucket_of[parameter]
            bucket.take(parameter)
            bucket.n_missing -= 1
            if bucket.n_missing == 0:
                self._start_ready(devices)

    def _start_ready(self, devices: Group) -> None:
        queue = self._queues[devices]
        while self._next[devices] < len(queue) and queue[self._next[devices]].n_missing == 0:
            self._start(devices, queue[self._next[devices]])
            self._next[devices] += 1

    def _start(self, devices: Group, bucket: _Bucket) -> None:
        bucket.collect()
        if self._is_muted:
            return
        clock, recorder = self._recorder.clock, self._recorder
        start = clock.mark()
        n_bytes = bucket.flat.numel() * bucket.flat.element_size()
        work = dist.all_reduce(bucket.flat, group=self._groups[devices], async_op=True)

        def note_end() -> None:
            end = self._completions[devices].mark(work, clock)
            recorder.add_marks("communication", start, end, name=bucket.name, n_bytes=n_bytes)

        bucket.work = with_end(work, note_end, is_nccl=self._is_nccl)

    def finish(self) -> None:
        """Start the remaining buckets and wait for all all-reduces; all devices must call it.

        Raises:
            PeerError: another device died or hangs; NCCL ends this process instead.
        """
        for devices, queue in self._queues.items():
            for bucket in queue:
                bucket.n_missing = 0
            self._start_ready(devices)
        if self._is_muted:
            return
        for devices, queue in self._queues.items():
            for bucket in queue:
                try:
                    bucket.work.wait()
                except RuntimeError as error:
                    raise PeerError(
                        f"the sum of the gradients of {self._label(bucket)} over ranks "
                        f"{list(devices)} failed ({gist(error)}): one of them died or hangs, "
                        "look at their logs",
                        devices,
                    ) from error

    def _label(self, bucket: _Bucket) -> str:
        names = [self._name_of[parameter] for parameter in bucket.parameters]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({bucket.name})"


def with_end(work: Any, note_end: Callable[[], None], *, is_nccl: bool) -> Any:
    """Record the end of a collective; return the work to wait for."""
    if is_nccl:  # its callback would run at once, on a stream that one of its groups may use
        note_end()
        return work

    def finish(future: Any) -> Any:
        note_end()
        return future.value()

    return work.get_future().then(finish)


def bucketed(parameters: Sequence[nn.Parameter], n_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters, in the order of backward; a bucket ends when it reaches its size."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room <= 0:
            room = n_bytes if found else first_bucket_bytes(n_bytes)
            found.append([])
        found[-1].append(parameter)
        room -= parameter.numel() * parameter.element_size()
    return found

"""Time one operator alone: forward and backward, again and again, on real tensors.

An iteration runs the operator as training would: under autocast, recording gradients, with inputs
that were written just before, as their producer would have, and with everything else out of the
cache where the whole model would have pushed it out. What pushes data out takes the code of calls
and of autograd with it, which in training the operator before has just used: on CPUs a tiny
operator is called first. A GPU is held up until what is timed is queued: marks of one that had
nothing to do would time the host's calls.

    [hold, flush] write inputs, wake | forward | [hold, flush] write gradients, wake | backward |
                            marks    ^         ^                                     ^          ^

Under a CPU quota the process runs and pauses in turn, and on a shared core it is interrupted: which
operator that hits is chance. There the processor's time tells how the sample's time is shared out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from harness.errors import VerificationError
from harness.measure.clock import Clock
from harness.runtime.sampling import Budget

# Iterations between two waits: few enough that their marks and tensors stay small.
_N_BATCH = 16
# Iterations of a sample, however short they are.
_MOST_EACH = 1024
# Iterations of what computes nothing, and how long they may take unless that is too few.
_N_IDLE, _LEAST_IDLE, _IDLE_S = 65, 9, 2.0
# Half a millisecond at 2 GHz: longer than the host takes to call an operator or its backward.
_HOLD_CYCLES = 1_000_000

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class OperatorCall:
    """An operator with what it is called on.

    Attributes:
        function: called with args and kwargs; parameters are its own.
        args, kwargs: nested; tensors that carry gradients say so by `requires_grad`.
        parameters: get gradients too.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OperatorSamples:
    """Seconds of each sample; a sample is a mean over as many iterations as it needs to be steady.

    Attributes:
        backward_s: zeros for an operator that has no gradient.
        saved_bytes: of the tensors kept for the backward pass, with inputs, without parameters.
    """

    forward_s: list[float]
    backward_s: list[float]
    saved_bytes: int

    @property
    def median_forward_s(self) -> float:
        return statistics.median(self.forward_s)

    @property
    def median_backward_s(self) -> float:
        return statistics.median(self.backward_s)

    @property
    def spread(self) -> float:
        """Interquartile range over the median of forward plus backward."""
        sums = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        if len(sums) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(sums, n=4, method="inclusive")
        return (high - low) / middle if middle > 0 else 0.0


def hold_gpu() -> None:
    """Keep the GPU busy for about half a millisecond; does not wait for it."""
    torch.cuda._sleep(_HOLD_CYCLES)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def as_leaves(value: Any, *, has_gradient: bool) -> Any:
    """Detach nested tensors, those of floating point with or without a gradient."""

    def leaf(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.detach().requires_grad_(has_gradient and part.is_floating_point())

    return fx.node.map_aggregate(value, leaf)


class Mark(NamedTuple):
    """An instant by the clock, and the processor's seconds so far."""

    at: Any
    processor_s: float


@dataclass(frozen=True)
class _Marks:
    """One iteration; backward is None for an operator without gradients."""

    forward: tuple[Mark, Mark]
    backward: tuple[Mark, Mark] | None

    @property
    def end(self) -> Mark:
        return self.forward[1] if self.backward is None else self.backward[1]


class OpTimer:
    """Times operators on one device by one clock.

    Args:
        autocast: makes the context of a forward pass; entered anew each time, since it keeps casts
            of parameters as long as it lasts.
        flush: passes so many bytes through the cache; None leaves it as it is.
        hold: keeps the device busy while the host queues what is timed; None where it queues
            nothing.
        shortest_s: how long a sample must be to be steady, from `shortest_sample_s`.
        processor: reads the seconds that this process has computed, to share a sample's time out
            by; None where the clock reads the device's own time.
    """

    def __init__(
        self,
        clock: Clock,
        budget: Budget,
        *,
        device: torch.device,
        autocast: Autocast,
        flush: Callable[[float], None] | None = None,
        hold: Callable[[], None] | None = None,
        shortest_s: float = 0.0,
        processor: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._budget = budget
        self._device = device
        self._autocast = autocast
        self._flush = flush or (lambda n_bytes: None)
        self._hold = hold or (lambda: None)
        self._shortest_s = shortest_s
        self._processor = processor
        self._n_between = math.inf
        self._idle: dict[float, tuple[float, float]] = {}
        self._tiny = torch.zeros(1, device=device, requires_grad=True)
        self._tiny_operator = torch.nn.ReLU()

    def measure(
        self,
        call: OperatorCall,
        what: str = "operator",
        before: OperatorSamples | None = None,
        *,
        n_between: float = math.inf,
    ) -> OperatorSamples:
        """Forward and backward seconds, less what calling and reading clocks cost by themselves.

        Args:
            before: samples of the same call that were taken before; new ones are added.
            n_between: bytes that pass through the cache between this operator of one step and of
                the next.

        Raises:
            VerificationError: an output or a gradient is not finite.
        """
        self._n_between = n_between
        saved_bytes = self._verify(call, what) if before is None else before.saved_bytes
        forward_s, backward_s = self._sample(call, self._shortest_s)
        idle_forward_s, idle_backward_s = self._idle_s()
        forward_s = [max(0.0, value - idle_forward_s) for value in forward_s]
        backward_s = [max(0.0, value - idle_backward_s) for value in backward_s]
        if before is not None:
            forward_s = before.forward_s + forward_s
            backward_s = before.backward_s + backward_s
        return OperatorSamples(forward_s=forward_s, backward_s=backward_s, saved_bytes=saved_bytes)

    def _idle_s(self) -> tuple[float, float]:
        """Forward and backward of what computes nothing: reading clocks, and a start of autograd,
        which a whole step pays once.

        Medians over iterations: all operators lose them, so chance must not decide.
        """
        if self._n_between not in self._idle:
            call = OperatorCall(lambda x: x.view_as(x), (self._tiny,), {})
            whole_s = self._warm_up(call, [self._tiny])
            n = min(_N_IDLE, max(_LEAST_IDLE, round(_IDLE_S / max(whole_s, 1e-6))))
            sample = [self._iterate(call, [self._tiny]) for _ in range(n)]
            self._clock.settle()
            pace = self._pace(sample)
            self._idle[self._n_between] = (
                statistics.median(self._seconds(one.forward, pace) for one in sample),
                statistics.median(
                    self._seconds(one.backward, pace) for one in sample if one.backward
                ),
            )
        return self._idle[self._n_between]

    def _verify(self, call: OperatorCall, what: str) -> int:
        """Run once, check that all is finite; returns the bytes saved for the backward pass."""
        own = {parameter.data_ptr() for parameter in call.parameters}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                n_bytes = tensor.numel() * tensor.element_size()
                saved[tensor.data_ptr()] = max(n_bytes, saved.get(tensor.data_ptr(), 0))
            return tensor

        args, kwargs = _written((call.args, call.kwargs))
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with hooks, self._autocast():
            output = call.function(*args, **kwargs)
        results = tensors_in(output)
        gradients = self._gradients(call, output)
        for kind, tensors in (("output", results), ("gradient", gradients)):
            for tensor in tensors:
                values = tensor.coalesce().values() if tensor.is_sparse else tensor
                if not bool(torch.isfinite(values).all()):
                    raise VerificationError(
                        f"{what} gives {kind}s that are not finite on finite inputs: check its "
                        "initial weights, or another --dtype"
                    )
        return sum(saved.values())

    def _gradients(self, call: OperatorCall, output: Any) -> list[Tensor]:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        wanted = _wanted(call)
        if not outputs or not wanted:
            return []
        ones = [torch.ones_like(tensor) for tensor in outputs]
        found = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    def _mark(self) -> Mark:
        return Mark(self._clock.mark(), 0.0 if self._processor is None else self._processor())

    def _wake_forward(self) -> Tensor | None:
        """Have the code of calls in the caches; None where another processor computes."""
        return self._tiny_operator(self._tiny) if self._device.type == "cpu" else None

    def _wake_backward(self, woken: Tensor | None) -> None:
        if woken is not None:
            torch.autograd.grad(woken, self._tiny)

    def _iterate(self, call: OperatorCall, wanted: Sequence[Tensor]) -> _Marks:
        self._hold()
        self._flush(self._n_between)
        # Operators in place spoil their inputs; and a producer would just have written them.
        args, kwargs = _written((call.args, call.kwargs))
        with self._autocast():
            woken = self._wake_forward()
            start = self._mark()
            output = call.function(*args, **kwargs)
            end = self._mark()
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not outputs or not wanted:
            return _Marks((start, end), None)
        self._hold()
        self._flush(self._n_between)
        ones = [torch.ones_like(tensor) for tensor in outputs]
        self._wake_backward(woken)
        begin = self._mark()
        torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        return _Marks((start, end), (begin, self._mark()))

    def _sample(self, call: OperatorCall, shortest_s: float) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of each sample."""
        wanted = _wanted(call)
        whole_s = self._warm_up(call, wanted)
        n_each = min(_MOST_EACH, max(1, math.ceil(shortest_s / max(whole_s, 1e-6))))
        n_samples = self._budget.count(whole_s * n_each)
        pairs = [self._mean(call, wanted, n) for n in _batches(n_samples, n_each)]
        samples = [pair for batch in pairs for pair in batch]
        return [pair[0] for pair in samples], [pair[1] for pair in samples]

    def _warm_up(self, call: OperatorCall, wanted: Sequence[Tensor]) -> float:
        """Seconds of the last of the iterations that do not count."""
        for _ in range(self._budget.n_warm_up - 1):
            self._iterate(call, wanted)
        self._clock.settle()
        before = self._clock.mark()
        self._iterate(call, wanted)
        after = self._clock.mark()
        self._clock.settle()
        return self._clock.seconds_at(after) - self._clock.seconds_at(before)

    def _mean(
        self, call: OperatorCall, wanted: Sequence[Tensor], sizes: list[int]
    ) -> list[tuple[float, float]]:
        """Samples of so many iterations each; waits only at their end, or a queue would run dry."""
        marks: list[list[_Marks]] = []
        for n in sizes:
            marks.append([self._iterate(call, wanted) for _ in range(n)])
        self._clock.settle()
        return [(self._forward_s(sample), self._backward_s(sample)) for sample in marks]

    def _forward_s(self, sample: list[_Marks]) -> float:
        pace = self._pace(sample)
        return statistics.fmean(self._seconds(marks.forward, pace) for marks in sample)

    def _backward_s(self, sample: list[_Marks]) -> float:
        pace = self._pace(sample)
        return statistics.fmean(
            0.0 if marks.backward is None else self._seconds(marks.backward, pace)
            for marks in sample
        )

    def _pace(self, sample: list[_Marks]) -> float | None:
        """Seconds that pass for each second that the processor computes; None by the clock."""
        if self._processor is None:
            return None
        first, last = sample[0].forward[0], sample[-1].end
        computed_s = last.processor_s - first.processor_s
        passed_s = self._clock.seconds_at(last.at) - self._clock.seconds_at(first.at)
        return passed_s / computed_s if computed_s > 0 else None

    def _seconds(self, marks: tuple[Mark, Mark], pace: float | None) -> float:
        if pace is not None:
            return (marks[1].processor_s - marks[0].processor_s) * pace
        return self._clock.seconds_at(marks[1].at) - self._clock.seconds_at(marks[0].at)


def _batches(n_samples: int, n_each: int) -> Iterator[list[int]]:
    """Group samples of `n_each` iterations so that a group has about `_N_BATCH` of them."""
    n_group = max(1, _N_BATCH // n_each)
    for at in range(0, n_samples, n_group):
        yield [n_each] * min(n_group, n_samples - at)


def _wanted(call: OperatorCall) -> list[Tensor]:
    """What gets a gradient, each once."""
    leaves = [*tensors_in(call.args), *tensors_in(call.kwargs), *call.parameters]
    unique = {id(tensor): tensor for tensor in leaves if tensor.requires_grad}
    return list(unique.values())


def _written(value: Any) -> Any:
    """Copies of nested tensors, connected to their leaves; one that stands twice stays one."""
    known: dict[int, Tensor] = {}

    def copied(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        if id(part) not in known:
            known[id(part)] = part.clone()
        return known[id(part)]

    return fx.node.map_aggregate(value, copied)

"""Time operators where they stand in a model: forward and backward, again and again.

An iteration runs a stretch of the model forward for each microbatch that is in flight, then
backward, as a device of a pipeline does; marks stand around each operator that is timed:

    forward #0  a | b | c    forward #1  a | b | c    backward #0  c | b | a    backward #1  ...
                ^   ^   ^ marks

What an operator finds in the caches, how its memory is had, and whether its code is warm, is what
the operators before it leave behind: as in training. A substitute of an operator, such as a part
of its weights, runs just before it and is timed in its place. A GPU is held up until what is timed
is queued: marks of one that had nothing to do would time the host's calls.

Under a CPU quota the process runs and pauses in turn, and on a shared core it is interrupted: which
operator that hits is chance. There the time of a sample is shared out by the processor's time.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.measure.clock import Clock
from harness.runtime.devices.sampling import Budget
from harness.runtime.profiling.stretch import OperatorCall, Pending, Step, Stretch, tensors_in

# Iterations of a sample, however short they are.
_MOST_EACH = 1024
# Steps between two that compute nothing, which tell what reading clocks and starting autograd take.
_IDLE_EVERY = 4

Autocast = Callable[[], AbstractContextManager[Any]]
# What is called in an operator's place, made of the operator's own call.
Substitute = Callable[[OperatorCall], OperatorCall]


@dataclass(frozen=True, kw_only=True)
class OperatorSamples:
    """Seconds of each sample; a sample is a mean over as many iterations as it needs to be steady.

    Attributes:
        backward_s: zeros for an operator that has no gradient.
    """

    forward_s: list[float]
    backward_s: list[float]

    def __add__(self, other: OperatorSamples) -> OperatorSamples:
        return OperatorSamples(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
        )

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


class Mark(NamedTuple):
    """An instant by the clock, and the processor's seconds so far."""

    at: Any
    processor_s: float


Lap = tuple[Mark, Mark]


@dataclass
class _Laps:
    """What a sample's iterations timed: laps of each operator, of what computes nothing, and of
    all there was."""

    forward: dict[str, list[Lap]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[Lap]] = field(default_factory=lambda: defaultdict(list))
    idle_forward: list[Lap] = field(default_factory=list)
    idle_backward: list[Lap] = field(default_factory=list)
    whole: list[Lap] = field(default_factory=list)


class _Idle(NamedTuple):
    """Seconds of what computes nothing."""

    forward_s: list[float]
    backward_s: list[float]


class OpTimer:
    """Times operators on one device by one clock.

    Args:
        autocast: makes the context of a forward pass; entered anew each time, since it keeps casts
            of parameters as long as it lasts.
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
        hold: Callable[[], None] | None = None,
        shortest_s: float = 0.0,
        processor: Callable[[], float] | None = None,
    ) -> None:
        self._clock, self._budget, self._autocast = clock, budget, autocast
        self._hold = hold or (lambda: None)
        self._shortest_s = shortest_s
        self._processor = processor
        self._tiny = torch.zeros(1, device=device, requires_grad=True)

    def measure(
        self,
        stretch: Stretch,
        names: Sequence[str],
        substitutes: Mapping[str, Substitute] | None = None,
        *,
        n_in_flight: int = 1,
        is_added: bool = False,
    ) -> dict[str, OperatorSamples]:
        """Forward and backward seconds, less what calling and reading clocks cost by themselves.

        Args:
            names: of the operators to time.
            substitutes: called and timed in the place of some of them.
            n_in_flight: microbatches that go forward before the first goes backward.
            is_added: gradients of parameters are, to those of earlier microbatches.

        Returns:
            By name; operators that are not in the stretch are not in it.
        """
        run = _Iteration(self, set(names), substitutes or {}, n_in_flight, is_added)
        whole_s = self._warm_up(run, stretch)
        n_each = min(_MOST_EACH, max(1, math.ceil(self._shortest_s / max(whole_s, 1e-6))))
        budget = replace(self._budget, time_s=self._budget.time_s * len(names))
        samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        idle = _Idle([], [])
        for _ in range(budget.count(whole_s * n_each)):
            laps = self._sample(run, stretch, n_each)
            ratio = self._wall_ratio(laps)
            for name, own in laps.forward.items():
                back = laps.backward.get(name, [])
                backward_s = self._mean_s(back, ratio) if back else 0.0
                samples[name].append((self._mean_s(own, ratio), backward_s))
            idle.forward_s.extend(self._seconds(lap, ratio) for lap in laps.idle_forward)
            idle.backward_s.extend(self._seconds(lap, ratio) for lap in laps.idle_backward)
        # Medians over laps: all operators lose them, so chance must not decide.
        idle_s = [statistics.median(seconds) if seconds else 0.0 for seconds in idle]
        return {
            name: OperatorSamples(
                forward_s=[max(0.0, forward_s - idle_s[0]) for forward_s, _ in own],
                backward_s=[max(0.0, backward_s - idle_s[1]) for _, backward_s in own],
            )
            for name, own in samples.items()
        }

    def _warm_up(self, run: _Iteration, stretch: Stretch) -> float:
        """Seconds of the last of the iterations that do not count."""
        for _ in range(self._budget.n_warm_up - 1):
            self._sample(run, stretch, 1)
        before = self._clock.mark()
        self._sample(run, stretch, 1)
        after = self._clock.mark()
        self._clock.settle()
        return self._clock.seconds_at(after) - self._clock.seconds_at(before)

    def _sample(self, run: _Iteration, stretch: Stretch, n_each: int) -> _Laps:
        run.laps = _Laps()
        start = self.mark()
        for _ in range(n_each):
            run.iterate(stretch)
        run.laps.whole.append((start, self.mark()))
        run.forget()
        self._clock.settle()
        return run.laps

    def _wall_ratio(self, laps: _Laps) -> float | None:
        """Seconds that pass for each second of processor time; None by the clock."""
        if self._processor is None:
            return None
        ((first, last),) = laps.whole
        computed_s = last.processor_s - first.processor_s
        passed_s = self._clock.seconds_at(last.at) - self._clock.seconds_at(first.at)
        return passed_s / computed_s if computed_s > 0 else None

    def _mean_s(self, laps: list[Lap], ratio: float | None) -> float:
        return statistics.fmean(self._seconds(lap, ratio) for lap in laps)

    def _seconds(self, lap: Lap, ratio: float | None) -> float:
        if ratio is not None:
            return (lap[1].processor_s - lap[0].processor_s) * ratio
        return self._clock.seconds_at(lap[1].at) - self._clock.seconds_at(lap[0].at)

    # What an iteration needs

    def mark(self) -> Mark:
        return Mark(self._clock.mark(), 0.0 if self._processor is None else self._processor())

    def hold(self) -> None:
        self._hold()

    def autocast(self) -> AbstractContextManager[Any]:
        return self._autocast()

    def idle_forward(self) -> Lap:
        """How long it takes to read clocks, around what computes nothing."""
        self._hold()
        start = self.mark()
        self._tiny.view_as(self._tiny)
        return start, self.mark()

    def idle_backward(self) -> Lap:
        """How long it takes to start autograd, which a whole step pays once, and to read clocks."""
        output = self._tiny.view_as(self._tiny)
        one = torch.ones_like(output)
        self._hold()
        start = self.mark()
        torch.autograd.grad([output], [self._tiny], [one], allow_unused=True)
        return start, self.mark()


class _Beside(NamedTuple):
    """What was timed in an operator's place and waits for its backward."""

    call: OperatorCall
    outputs: list[Tensor]


class _Iteration:
    """Runs a stretch, timing some of its operators."""

    def __init__(
        self,
        timer: OpTimer,
        names: set[str],
        substitutes: Mapping[str, Substitute],
        n_in_flight: int,
        is_added: bool,
    ) -> None:
        self._timer, self._names, self._substitutes = timer, names, substitutes
        self._n_in_flight, self._is_added = n_in_flight, is_added
        self.laps = _Laps()
        self._beside: dict[str, list[_Beside]] = defaultdict(list)
        self._gradients: dict[Tensor, Tensor] = {}
        self._n_forward = self._n_backward = 0

    def iterate(self, stretch: Stretch) -> None:
        """Forward of all microbatches, then backward of all, in the same order."""
        if not self._is_added:
            self.forget()
        self._beside.clear()
        flights = []
        for _ in range(self._n_in_flight):
            with self._timer.autocast():
                flights.append(stretch.forward(self._forward))
        for flight in flights:
            stretch.backward(flight, self._backward)

    def forget(self) -> None:
        """Let go of the gradients of parameters."""
        self._gradients.clear()

    def _forward(self, step: Step, call: OperatorCall) -> Any:
        self._n_forward += 1
        if self._n_forward % _IDLE_EVERY == 1:
            self.laps.idle_forward.append(self._timer.idle_forward())
        if step.name not in self._names:
            return call()
        other = self._substitutes.get(step.name)
        if other is None:
            return self._time_forward(step.name, call)
        beside = other(call)
        output = self._time_forward(step.name, beside)
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._beside[step.name].append(_Beside(beside, outputs))
        del output, outputs
        return call()

    def _time_forward(self, name: str, call: OperatorCall) -> Any:
        self._timer.hold()
        start = self._timer.mark()
        output = call()
        self.laps.forward[name].append((start, self._timer.mark()))
        return output

    def _backward(self, step: Step, pending: Pending, wanted: list[Tensor]) -> Sequence[Any]:
        self._n_backward += 1
        if self._n_backward % _IDLE_EVERY == 1:
            self.laps.idle_backward.append(self._timer.idle_backward())
        waiting = self._beside.get(step.name)
        if waiting:
            self._time_beside(step.name, waiting.pop(0))
        is_timed = step.name in self._names and step.name not in self._substitutes
        if is_timed:
            self._timer.hold()
        start = self._timer.mark() if is_timed else None
        # Where several read an output, their gradients are added up first, as autograd does.
        gradients = [sum(parts[1:], start=parts[0]) for parts in pending.gradients]
        found = torch.autograd.grad(pending.outputs, wanted, gradients, allow_unused=True)
        if start is not None:
            self.laps.backward[step.name].append((start, self._timer.mark()))
        return [self._taken(x, gradient) for x, gradient in zip(wanted, found, strict=True)]

    def _time_beside(self, name: str, beside: _Beside) -> None:
        wanted = beside.call.wanted
        if not beside.outputs or not wanted:
            return
        ones = [torch.ones_like(tensor) for tensor in beside.outputs]
        self._timer.hold()
        start = self._timer.mark()
        torch.autograd.grad(beside.outputs, wanted, ones, allow_unused=True)
        self.laps.backward[name].append((start, self._timer.mark()))

    def _taken(self, x: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of an input; that of a parameter is kept, or added to that of earlier
        microbatches, as training does beside it."""
        if gradient is None or not isinstance(x, nn.Parameter):
            return gradient
        before = self._gradients.get(x)
        if before is None or gradient.is_sparse:
            self._gradients[x] = gradient
        else:
            before.add_(gradient)
        return None

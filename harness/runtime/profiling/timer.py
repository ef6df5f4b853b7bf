"""Time forward and backward of operators within a model, over many iterations.

An iteration runs a subgraph of the model forward for each microbatch in flight, then backward, as a
device of a pipeline does, with marks around each timed operator:

    forward #0  a | b | c    forward #1  a | b | c    backward #0  c | b | a    backward #1  ...
                ^   ^   ^ marks

The preceding operators leave caches, allocator and code in the same state as in training. A
substitute of an operator, such as its shard, runs just before it and is timed in its place. A GPU
is kept busy until the timed operator is queued, because marks on an idle GPU would time the host's
calls.

Under a CPU quota the process pauses periodically, and on a shared core it is interrupted, at random
operators. So the time of a CPU's sample is distributed over operators by their processor time.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from harness.measure.recorder import Clock
from harness.runtime.capture.saved import tensors_within
from harness.runtime.devices.sampling import Budget
from harness.runtime.profiling.subgraph import OperatorCall, Pending, Step, Subgraph

# Maximum number of iterations in a sample.
_MOST_EACH = 1024
# Steps between two idle laps, which measure the overhead of reading clocks and starting autograd.
_IDLE_EVERY = 4

Autocast = Callable[[], AbstractContextManager[Any]]
# Converts an operator's call to the call that is timed in its place.
Substitute = Callable[[OperatorCall], OperatorCall]


@dataclass(frozen=True, kw_only=True)
class OperatorSamples:
    """Seconds of each sample; a sample is the mean over the iterations of a minimum duration.

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
    """A mark of the clock, and the processor time so far."""

    at: Any
    processor_s: float


Lap = tuple[Mark, Mark]
T = TypeVar("T")


@dataclass
class _Laps:
    """Laps of a sample: of each operator, idle laps (without computation), and the whole."""

    forward: dict[str, list[Lap]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[Lap]] = field(default_factory=lambda: defaultdict(list))
    idle_forward: list[Lap] = field(default_factory=list)
    idle_backward: list[Lap] = field(default_factory=list)
    whole: list[Lap] = field(default_factory=list)


class OpTimer:
    """Times operators on one device by one clock.

    Args:
        autocast: makes the context of a forward pass; entered for each pass, because it caches
            casts of parameters until it ends.
        hold: keeps a GPU busy while the host queues the timed operator; None on a CPU.
        shortest_s: minimum duration of a sample, from `shortest_sample_s`.
        processor: reads this process's CPU time, by which a sample's time is distributed; None on
            a GPU, whose clock reads its own time.
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
        self._clock, self._budget = clock, budget
        self.autocast, self._hold = autocast, hold or (lambda: None)
        self._shortest_s = shortest_s
        self._processor = processor
        self._tiny = torch.zeros(1, device=device, requires_grad=True)

    def measure(
        self,
        subgraph: Subgraph,
        names: Sequence[str],
        substitutes: Mapping[str, Substitute] | None = None,
        *,
        n_in_flight: int = 1,
        is_added: bool = False,
        show: Callable[[float], None] = lambda share: None,
    ) -> dict[str, OperatorSamples]:
        """Measure forward and backward seconds, minus the overhead of idle laps.

        Args:
            names: operators to time.
            substitutes: calls that are timed in place of operators, by operator.
            n_in_flight: microbatches that run forward before the first runs backward.
            is_added: whether gradients of parameters are added to those of earlier microbatches.
            show: called before each sample with the share of them that is taken.

        Returns:
            Samples by name, without operators that are not in the subgraph.
        """
        run = _Iteration(self, set(names), substitutes or {}, n_in_flight, is_added)
        whole_s = self._warm_up(run, subgraph)
        n_each = min(_MOST_EACH, max(1, math.ceil(self._shortest_s / max(whole_s, 1e-6))))
        budget = replace(self._budget, time_s=self._budget.time_s * len(names))
        samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        idle: tuple[list[float], list[float]] = [], []  # forward and backward
        n_samples = budget.count(whole_s * n_each)
        for taken in range(n_samples):
            show(taken / n_samples)
            laps = self._sample(run, subgraph, n_each)
            ratio = self._wall_ratio(laps)
            for name, forward in laps.forward.items():
                backward = laps.backward.get(name, [])
                backward_s = self._mean_s(backward, ratio) if backward else 0.0
                samples[name].append((self._mean_s(forward, ratio), backward_s))
            for seconds, found in zip(idle, (laps.idle_forward, laps.idle_backward), strict=True):
                seconds.extend(self._seconds(lap, ratio) for lap in found)
        # Medians are robust; an outlier in the overhead would bias all operators.
        idle_s = [statistics.median(seconds) if seconds else 0.0 for seconds in idle]
        return {
            name: OperatorSamples(
                forward_s=[max(0.0, forward_s - idle_s[0]) for forward_s, _ in pairs],
                backward_s=[max(0.0, backward_s - idle_s[1]) for _, backward_s in pairs],
            )
            for name, pairs in samples.items()
        }

    def _warm_up(self, run: _Iteration, subgraph: Subgraph) -> float:
        """Run the warm-up iterations; returns the mean seconds of the last ones, which together
        take as long as a sample, because a CPU quota may pause any single one."""
        for _ in range(self._budget.n_warm_up - 1):
            self._sample(run, subgraph, 1)
        n, passed_s, before = 0, 0.0, self._clock.mark()
        while n == 0 or (passed_s < self._shortest_s and n < _MOST_EACH):
            self._sample(run, subgraph, 1)
            n, after = n + 1, self._clock.mark()
            self._clock.settle()
            passed_s = self._clock.seconds_at(after) - self._clock.seconds_at(before)
        return passed_s / n

    def _sample(self, run: _Iteration, subgraph: Subgraph, n_each: int) -> _Laps:
        run.laps = _Laps()
        start = self.mark()
        for _ in range(n_each):
            run.iterate(subgraph)
        run.laps.whole.append((start, self.mark()))
        run.forget()
        self._clock.settle()
        return run.laps

    def _wall_ratio(self, laps: _Laps) -> float | None:
        """Wall-clock seconds per second of processor time; None if the clock is used."""
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

    # Called by _Iteration

    def mark(self) -> Mark:
        return Mark(self._clock.mark(), 0.0 if self._processor is None else self._processor())

    def timed(self, run: Callable[[], T], laps: list[Lap]) -> T:
        """What a function returns, and its lap, behind what is queued on a GPU."""
        self._hold()
        start = self.mark()
        result = run()
        laps.append((start, self.mark()))
        return result

    def time_idle_forward(self, laps: list[Lap]) -> None:
        """Time two readings of the clock around a view, which computes nothing."""
        self.timed(partial(self._tiny.view_as, self._tiny), laps)

    def time_idle_backward(self, laps: list[Lap]) -> None:
        """Time the start of autograd, which a whole step pays only once, with clock readings."""
        output = self._tiny.view_as(self._tiny)
        one = torch.ones_like(output)
        self.timed(partial(_gradients, [output], [self._tiny], [one]), laps)


def _gradients(
    outputs: list[Tensor], wanted: list[Tensor], gradients: list[Tensor]
) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)


class _Iteration:
    """Runs a subgraph, timing some of its operators."""

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
        # Calls of substitutes between forward and backward, and their outputs.
        self._waiting: dict[str, list[tuple[OperatorCall, list[Tensor]]]] = defaultdict(list)
        self._gradients: dict[Tensor, Tensor] = {}
        self._n_forward = self._n_backward = 0

    def iterate(self, subgraph: Subgraph) -> None:
        """Run forward of all microbatches, then backward of all, in the same order."""
        if not self._is_added:
            self.forget()
        self._waiting.clear()
        flights = []
        for _ in range(self._n_in_flight):
            with self._timer.autocast():
                flights.append(subgraph.forward(self._forward))
        for flight in flights:
            subgraph.backward(flight, self._backward)

    def forget(self) -> None:
        """Drop the gradients of parameters."""
        self._gradients.clear()

    def _forward(self, step: Step, call: OperatorCall) -> Any:
        self._n_forward += 1
        if self._n_forward % _IDLE_EVERY == 1:
            self._timer.time_idle_forward(self.laps.idle_forward)
        if step.name not in self._names:
            return call()
        substitute, laps = self._substitutes.get(step.name), self.laps.forward[step.name]
        if substitute is None:
            return self._timer.timed(call, laps)
        timed = substitute(call)
        output = self._timer.timed(timed, laps)
        outputs = [tensor for tensor in tensors_within(output) if tensor.requires_grad]
        self._waiting[step.name].append((timed, outputs))
        del output, outputs
        return call()

    def _backward(self, step: Step, pending: Pending, wanted: list[Tensor]) -> Sequence[Any]:
        self._n_backward += 1
        if self._n_backward % _IDLE_EVERY == 1:
            self._timer.time_idle_backward(self.laps.idle_backward)
        waiting = self._waiting.get(step.name)
        if waiting:
            self._time_substitute(step.name, *waiting.pop(0))

        def run() -> tuple[Tensor | None, ...]:
            # Gradients from several readers of an output are summed first, as in autograd.
            gradients = [sum(parts[1:], start=parts[0]) for parts in pending.gradients]
            return _gradients(pending.outputs, wanted, gradients)

        is_timed = step.name in self._names and step.name not in self._substitutes
        found = self._timer.timed(run, self.laps.backward[step.name]) if is_timed else run()
        return [self._passed_on(x, gradient) for x, gradient in zip(wanted, found, strict=True)]

    def _time_substitute(self, name: str, call: OperatorCall, outputs: list[Tensor]) -> None:
        wanted = call.wanted
        if outputs and wanted:
            ones = [torch.ones_like(tensor) for tensor in outputs]
            self._timer.timed(partial(_gradients, outputs, wanted, ones), self.laps.backward[name])

    def _passed_on(self, x: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of an input; store that of a parameter, or add it to that of earlier
        microbatches, as in training."""
        if gradient is None or not isinstance(x, nn.Parameter):
            return gradient
        before = self._gradients.get(x)
        if before is None or gradient.is_sparse:
            # Elements of an expanded gradient, as of a sum, are one place in memory.
            self._gradients[x] = gradient.clone() if 0 in gradient.stride() else gradient
        else:
            before.add_(gradient)
        return None

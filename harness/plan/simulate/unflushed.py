"""A step of asynchronous training: 1F1B without a flush, with an update for each microbatch.

Several steps are simulated as one long 1F1B, and the result is one of them:

    rank 0   F0 F1 | F2 B0 u F3 B1 u | ...       a step ends with its last backward, and that
    rank 1      F0 B0 u F1 B1 u | F2 B2 u ...    microbatch's update (u), on each rank by itself

All steps on a rank are equal from the second on, so any of them will do.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from harness.domain.record import Span
from harness.domain.strategy import Strategy
from harness.plan.simulate.passes import N_PASSES, WEIGHT
from harness.plan.simulate.report import contention_seconds, spans
from harness.plan.simulate.simulator import Simulation, Simulator, Trial
from harness.plan.simulate.tables import Tables
from harness.plan.simulate.transfers import Floats


@dataclass(frozen=True)
class Unflushed:
    """One simulated step.

    Attributes:
        memory_bytes: peak by device name, including all versions of the weights.
        spans: spans of the step by rank; times count from the first rank's start.
        contention_s: slowdown of computing by transfers, by rank.
    """

    step_s: float
    memory_bytes: dict[str, int]
    spans: dict[int, list[Span]]
    contention_s: list[float]


def simulate_unflushed(simulator: Simulator, strategy: Strategy) -> Unflushed:
    """Price one strategy by 1F1B.

    Raises:
        StrategyError: it does not fit the graph or the cluster.
    """
    simulator = Simulator(
        simulator.graph,
        simulator.profile,
        simulator.cluster,
        options=replace(simulator.options, updates_each_microbatch=True),
    )
    n_before = -(-len(strategy.stages) // strategy.n_microbatches)
    n_steps = n_before + 2
    stream = msgspec.structs.replace(
        strategy, batch=strategy.batch * n_steps, n_microbatches=strategy.n_microbatches * n_steps
    )
    simulation = simulator.simulate(stream)
    tables = Trial(simulator, stream).tables
    windows = _Windows(simulation, tables, strategy, n_before)
    weights = tables.weight_bytes.sum(axis=0)
    versions = windows.lags + 1  # one per microbatch in flight
    names = simulator.network.names
    fed = tables.step_input_bytes(strategy.n_microbatches)
    memory = simulation.outcome.memory_bytes + versions * weights - (n_steps - 1) * fed
    return Unflushed(
        step_s=windows.step_s,
        memory_bytes={name: round(n) for name, n in zip(names, memory, strict=True)},
        spans=windows.spans(),
        contention_s=[seconds / n_steps for seconds in contention_seconds(simulation)],
    )


class _Windows:
    """Start and end of one of the simulated steps on each device."""

    def __init__(
        self, simulation: Simulation, tables: Tables, strategy: Strategy, n_before: int
    ) -> None:
        self._simulation, self._n_microbatches = simulation, strategy.n_microbatches
        self._sums = _sum_seconds(simulation, tables)
        sets = strategy.stage_devices()
        self.lags = np.zeros(len(simulation.simulator.limits))
        for stage, devices in enumerate(sets):
            self.lags[list(devices)] = len(sets) - 1 - stage
        self._begin, self._end = (
            self._ends(steps * strategy.n_microbatches) for steps in (n_before, n_before + 1)
        )
        self.step_s = float(np.nanmax(self._end - self._begin))

    def _ends(self, n_fed: int) -> Floats:
        """(n_devices,) end of the step that follows `n_fed` microbatches; NaN for devices without a
        stage."""
        out = self._simulation.outcome
        n_rows, n_microbatches = len(out.lowered.rows), self._simulation.strategy.n_microbatches
        finish = out.finish[: out.lowered.begins[0]].reshape(N_PASSES, n_microbatches, n_rows)
        device_of = out.lowered.rows % len(self.lags)
        ends = np.full(len(self.lags), np.nan)
        for device in np.unique(device_of):
            last = n_fed - 1 - int(self.lags[device])
            ends[device] = np.nanmax(finish[WEIGHT, last, device_of == device])
        return ends

    def spans(self) -> dict[int, list[Span]]:
        """Spans by rank, with microbatches numbered within the step."""
        first = float(np.nanmin(self._begin))
        n, replace = self._n_microbatches, msgspec.structs.replace
        found: dict[int, list[Span]] = defaultdict(list)
        for rank, own in spans(self._simulation).items():
            begin, end = np.nan_to_num([self._begin[rank], self._end[rank]], nan=first).tolist()
            for span in own:
                if begin <= span.start_s < end and span.kind not in ("optimizer", "step"):
                    number = None if span.microbatch is None else span.microbatch % n
                    found[rank] += (
                        replace(part, microbatch=number, start_s=part.start_s - first)
                        for part in self._parts(rank, span)
                    )
            found[rank].append(
                Span(kind="step", step=0, start_s=begin - first, duration_s=self.step_s)
            )
        return found

    def _parts(self, rank: int, span: Span) -> Iterator[Span]:
        """Split a weight pass into the all-reduce over the stage's devices and the update."""
        if span.pass_ != "weights" or span.operator is None:
            yield span
            return
        sum_s = min(span.duration_s, self._sums.get((rank, span.operator), 0.0))
        if sum_s > 0:
            yield msgspec.structs.replace(
                span,
                kind="communication",
                name=f"all-reduce {span.operator}",
                duration_s=sum_s,
                stage=None,
            )
        yield msgspec.structs.replace(
            span, kind="optimizer", start_s=span.start_s + sum_s, duration_s=span.duration_s - sum_s
        )


def _sum_seconds(simulation: Simulation, tables: Tables) -> dict[tuple[int, str], float]:
    """Seconds of all-reducing gradients after each microbatch, by device and operator."""
    from harness.plan.simulate.lowering import update_seconds

    simulator, rows = simulation.simulator, simulation.outcome.lowered.rows
    names = [operator.name for operator in simulator.graph.operators]
    seconds, _ = update_seconds(simulator, tables, rows)
    return {
        (int(row) % tables.n_devices, names[int(row) // tables.n_devices]): float(one)
        for row, one in zip(rows, seconds, strict=True)
    }

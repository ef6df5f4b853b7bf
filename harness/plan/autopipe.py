"""PipeTransformer's own rule for a pipeline whose first layers are frozen (He et al., ICML 2021).

Stages are balanced by the size of their parameters alone, and their number is halved for as long as
the largest stage is no larger than at the start (Algorithm 1):

    8 stages, nothing frozen | 4 stages x 2, half frozen | 2 stages x 4, most frozen

It stands beside the search for comparison: it knows neither times nor links nor memory.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from harness.domain.graph import Graph
from harness.domain.sharding import has_tasks
from harness.domain.strategy import Strategy
from harness.errors import StrategyError
from harness.plan import builders
from harness.plan.simulate.simulator import Simulator

# Share of the size of a frozen layer that counts, because it keeps weights and outputs alone.
FROZEN_SHARE = 1 / 6
# A variance has another unit than a mean; the rule adds them in millions of parameters.
_BYTES_PER_UNIT = 4e6
# Microbatches for each stage that are tried; the published system profiles as many.
_MICROBATCHES_EACH = range(1, 7)


@dataclass(frozen=True)
class _Unit:
    """Operators that no cut separates, such as a residual branch and its addition."""

    operators: tuple[str, ...]
    size: float
    is_frozen: bool


class AutoPipe:
    """The rule for one training.

    Args:
        start: the pipeline that it began with.
        replicates: freed devices become replicas, else they idle.

    Raises:
        StrategyError: the start is no pipeline whose stages have equally many devices.
    """

    def __init__(self, start: Strategy, *, replicates: bool) -> None:
        groups = start.stage_devices()
        self._start, self._replicates = start, replicates
        self._n_stages, self._n_replicas = len(groups), len(groups[0])
        self._devices = [device for own in groups for device in own]
        is_equal = {len(own) for own in groups} == {self._n_replicas}
        if self._n_stages < 2 or not is_equal or len(set(self._devices)) < len(self._devices):
            raise StrategyError(
                "PipeTransformer's rule needs two stages or more, on equally many devices of their "
                f"own; {start.name} has stages on {', '.join(map(str, groups))}: start with "
                "--strategy pipeline, not interleaved, or use --shrink search"
            )

    def next_strategy(self, simulator: Simulator) -> Strategy:
        """The pipeline for the model of a simulator, with its frozen operators.

        Raises:
            StrategyError: the batch does not allow any number of microbatches.
        """
        graph, frozen = simulator.graph, simulator.options.frozen
        most = max(_sizes(balance_by_size(_units(graph, frozenset()), self._n_stages)))
        units, n_stages = _units(graph, frozen), self._n_stages
        while n_stages >= 2 and max(_sizes(balance_by_size(units, n_stages // 2))) <= most:
            n_stages //= 2
        stages = [
            [name for unit in stage for name in unit.operators]
            for stage in balance_by_size(units, n_stages)
        ]
        found = [
            self._pipeline(graph, stages, n * len(stages))
            for n in _MICROBATCHES_EACH
            if n * len(stages) * self._replicas_of(len(stages)) <= self._start.batch
        ]
        if not found:
            raise StrategyError(
                f"a batch of {self._start.batch} has no sample for each of {len(stages)} "
                f"microbatches on {self._replicas_of(len(stages))} replicas: raise --batch-size"
            )
        return simulator.fastest(found)

    def _replicas_of(self, n_stages: int) -> int:
        if not self._replicates:
            return self._n_replicas
        return self._n_replicas * self._n_stages // n_stages

    def _pipeline(self, graph: Graph, stages: list[list[str]], n_microbatches: int) -> Strategy:
        n_stages, n = len(stages), self._replicas_of(len(stages))
        groups = [self._devices[stage * n : (stage + 1) * n] for stage in range(n_stages)]
        return builders.pipeline(
            graph,
            self._start.batch,
            stages,
            groups,
            n_microbatches=n_microbatches,
            schedule=self._start.schedule,
            name=f"pipeline of {n_stages} x {n} ranks",
        )


def balance_by_size(units: Sequence[_Unit], n_stages: int) -> list[list[_Unit]]:
    """Cut units into at most so many stages, greedily: a stage takes units while it stays below the
    mean of the stages left plus their variance. The first has all frozen units."""
    first = list(takewhile(lambda unit: unit.is_frozen, units))
    stages, left = [first], list(units[len(first) :])
    for n_left in range(n_stages, 0, -1):
        sizes = [unit.size for unit in left]
        if not left:
            break
        limit = (sum(sizes) + statistics.pvariance(sizes)) / n_left
        size = FROZEN_SHARE * sum(unit.size for unit in stages[0]) if n_left == n_stages else 0.0
        is_empty = n_left < n_stages or not stages[0]
        if n_left < n_stages:
            stages.append([])
        while left and (n_left == 1 or is_empty or size + left[0].size < limit):
            size += left[0].size
            stages[-1].append(left.pop(0))
            is_empty = False
    return stages


def _sizes(stages: list[list[_Unit]]) -> list[float]:
    return [
        sum(unit.size * (FROZEN_SHARE if unit.is_frozen else 1) for unit in stage)
        for stage in stages
    ]


def _units(graph: Graph, frozen: frozenset[str]) -> list[_Unit]:
    """Runs of operators between which one tensor alone passes."""
    placed = [at for at, operator in enumerate(graph.operators) if has_tasks(operator)]
    consumers = graph.consumers()
    last = {at: max(consumers[at], default=at) for at in placed}
    cuts = [
        place + 1
        for place in range(len(placed) - 1)
        if sum(last[at] > placed[place] for at in placed[: place + 1]) == 1
    ]
    found = []
    for first, end in pairwise((0, *cuts, len(placed))):
        operators = [graph.operators[at] for at in placed[first:end]]
        found.append(
            _Unit(
                operators=tuple(operator.name for operator in operators),
                size=sum(operator.parameter_bytes for operator in operators) / _BYTES_PER_UNIT,
                is_frozen=operators[0].name in frozen and operators[-1].name in frozen,
            )
        )
    return found

"""How far predictions of this cluster may be off: from its own runs, else from known readings."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.domain.cluster import Cluster
from harness.errors import HarnessError
from harness.measure.derive.prediction import read_prediction
from harness.measure.derive.training import step_times
from harness.measure.store import find_runs, read_run

# Four in five of the cells in docs/readings.md have a median error below it.
_USUAL_ERROR = 0.15
_MOST_RUNS = 60


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """The range of measured / predicted steps.

    Attributes:
        n_strategies: that the range comes from; 0 where none was measured on this cluster.
    """

    low: float = 1 - _USUAL_ERROR
    high: float = 1 + _USUAL_ERROR
    n_strategies: int = 0

    @property
    def source(self) -> str:
        if self.n_strategies:
            return f"measured / predicted of {self.n_strategies} strategies on this cluster"
        return f"{_USUAL_ERROR:.0%} either way, because no run here has a prediction yet"


def uncertainty_of(results: Path | None, cluster: Cluster) -> Uncertainty:
    """The range of the medians over repeats of each strategy that was trained on these nodes."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for strategy, ratio in _ratios(results, cluster):
        ratios[strategy].append(ratio)
    medians = [statistics.median(found) for found in ratios.values()]
    if len(medians) < 2:
        return Uncertainty()
    return Uncertainty(low=min(1.0, *medians), high=max(1.0, *medians), n_strategies=len(medians))


def _ratios(results: Path | None, cluster: Cluster) -> Iterator[tuple[str, float]]:
    if results is None or not results.is_dir():
        return
    names = [node.name for node in cluster.nodes]
    runs = [
        (path, header)
        for path, header in find_runs(results)[0]
        if header.workload == "train" and header.status == "ok"
        if [node.name for node in header.cluster.nodes] == names
    ]
    for path, header in runs[-_MOST_RUNS:]:
        try:
            prediction = read_prediction(path)
            if prediction is None:
                continue
            times = step_times(read_run(path, header)[0])
        except HarnessError:
            continue
        if times:
            measured_s = statistics.median(times.values())
            yield (
                f"{header.config.get('model')} {prediction.strategy}",
                (measured_s / prediction.step_s),
            )

"""One rank in a training run: phases, work, memory, and whether it is slower than its like."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.domain.record import Record
from harness.domain.run import RankInfo
from harness.measure.derive.devices import info_of
from harness.measure.derive.spans import PHASES, PhaseTable, samples_of
from harness.measure.rank_records import Records
from harness.measure.store import Run

STRAGGLER_BELOW = 0.75
# Shares of a small batch differ by a sample.
_ALIKE = 0.3
MEMORY_METRIC = "memory_peak_bytes"


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """One rank's share; seconds are means over its steps, so that phases sum to the step.

    Attributes:
        busy_s: median of its own work in a step: what does not wait for other ranks.
        memory_bytes: peak by kind (allocated, reserved, rss, used).
        sent_bytes, received_bytes: NIC counter difference of a step, median.
        flops: of a step, median; None where they were not counted.
        stages: of a pipeline that it computes.
        is_straggler: of the ranks that compute the same stages with about as many FLOPs the fastest
            takes less than 0.75 of this one's seconds for each.
    """

    rank: int
    info: RankInfo
    n_steps: int
    phases: dict[str, float]
    busy_s: float | None
    memory_bytes: dict[str, float]
    sent_bytes: float | None
    received_bytes: float | None
    flops: float | None = None
    stages: frozenset[int] = frozenset()
    is_straggler: bool = False


def median_of(records: Sequence[Record], metric: str) -> float | None:
    """One rank's median over steps; samples of one step (several interfaces) add up."""
    by_step: dict[int | None, float] = defaultdict(float)
    for sample in samples_of(records, metric):
        by_step[sample.step] += sample.value
    return float(np.median(list(by_step.values()))) if by_step else None


def rank_memory(records: Sequence[Record]) -> dict[str, float]:
    """Peak bytes of one rank by kind.

    `used` is a GPU's own reading, others' use included; where `rss` stands the device is a CPU, of
    which the same reading is the process's.
    """
    peaks: dict[str, float] = {}
    for sample in samples_of(records, MEMORY_METRIC):
        kind = str(sample.labels.get("kind", "allocated"))
        peaks[kind] = max(peaks.get(kind, 0.0), sample.value)
    used = [sample.value for sample in samples_of(records, "memory_used_bytes")]
    return {**peaks, "used": max(used)} if used and "rss" not in peaks else peaks


def _mean_phases(table: PhaseTable) -> dict[str, float]:
    return {name: float(table.phases[name].mean()) for name in PHASES} if len(table.steps) else {}


def rank_summary(run: Run, rank: int, table: PhaseTable) -> RankSummary:
    """One rank of a run, from its records and its steps' phases; stragglers are not marked yet."""
    records = run.ranks[rank]
    return RankSummary(
        rank=rank,
        info=info_of(run, rank),
        n_steps=len(table.steps),
        phases=_mean_phases(table),
        busy_s=float(np.median(table.busy_s)) if len(table.steps) else None,
        flops=median_of(records, "model_flops"),
        stages=Records.of(records).stages,
        memory_bytes=rank_memory(records),
        sent_bytes=median_of(records, "nic_sent_bytes"),
        received_bytes=median_of(records, "nic_received_bytes"),
    )


def mark_stragglers(ranks: Sequence[RankSummary]) -> tuple[RankSummary, ...]:
    """The ranks, each told whether others do its work faster."""
    return tuple(dataclasses.replace(r, is_straggler=_is_straggler(r, ranks)) for r in ranks)


def _is_straggler(rank: RankSummary, ranks: Sequence[RankSummary]) -> bool:
    """Against ranks of equal work: stages of a pipeline take unlike times by design.

    A rank that a strategy leaves out has no work.
    """
    if not rank.busy_s or rank.flops == 0:
        return False
    alike = [other for other in ranks if other.busy_s and _does_alike(other, rank)]
    return min(map(_pace, alike)) / _pace(rank) < STRAGGLER_BELOW


def _does_alike(a: RankSummary, b: RankSummary) -> bool:
    if a.flops is None or b.flops is None:
        return a.stages == b.stages and a.flops is b.flops
    return a.stages == b.stages and math.isclose(a.flops, b.flops, rel_tol=_ALIKE)


def _pace(rank: RankSummary) -> float:
    """Seconds of own work, for each FLOP where they were counted."""
    assert rank.busy_s is not None
    return rank.busy_s / (rank.flops or 1.0)

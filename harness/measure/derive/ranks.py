"""One rank of a training run: phases, work, memory, and whether it is a straggler."""

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
from harness.measure.statistics import known_median
from harness.measure.store import Run

STRAGGLER_BELOW = 0.75
# Relative tolerance of equal work, because shares of a small batch differ by a sample.
_EQUAL_WORK = 0.3
MEMORY_METRIC = "memory_peak_bytes"


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """Numbers of one rank; seconds are means over its steps, so that phases sum to the step.

    Attributes:
        busy_s: median time of a step in which it does not wait for other ranks.
        memory_bytes: peak by kind (allocated, reserved, rss, used).
        sent_bytes, received_bytes: NIC counter difference of a step, median.
        flops: FLOPs of a step, median; None if not counted.
        stages: pipeline stages that it computes.
        is_straggler: among the ranks that compute the same stages with about as many FLOPs, the
            fastest takes less than 0.75 of this rank's seconds per FLOP.
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
    return known_median(by_step.values())


def rank_memory(records: Sequence[Record]) -> dict[str, float]:
    """Peak bytes of one rank by kind.

    `used` is a GPU's counter and includes other processes. It is dropped beside `rss`, because on a
    CPU it counts the same process.
    """
    peaks: dict[str, float] = {}
    for sample in samples_of(records, MEMORY_METRIC):
        kind = str(sample.labels.get("kind", "allocated"))
        peaks[kind] = max(peaks.get(kind, 0.0), sample.value)
    used = [sample.value for sample in samples_of(records, "memory_used_bytes")]
    return {**peaks, "used": max(used)} if used and "rss" not in peaks else peaks


def rank_summary(run: Run, rank: int, table: PhaseTable) -> RankSummary:
    """Summarise one rank from its records and phases; does not mark stragglers."""
    records, has_steps = run.ranks[rank], len(table.steps) > 0
    return RankSummary(
        rank=rank,
        info=info_of(run, rank),
        n_steps=len(table.steps),
        phases={name: float(table.phases[name].mean()) for name in PHASES if has_steps},
        busy_s=float(np.median(table.busy_s)) if has_steps else None,
        flops=median_of(records, "model_flops"),
        stages=Records.of(records).stages,
        memory_bytes=rank_memory(records),
        sent_bytes=median_of(records, "nic_sent_bytes"),
        received_bytes=median_of(records, "nic_received_bytes"),
    )


def mark_stragglers(ranks: Sequence[RankSummary]) -> tuple[RankSummary, ...]:
    """The ranks with `is_straggler` set."""
    return tuple(dataclasses.replace(r, is_straggler=_is_straggler(r, ranks)) for r in ranks)


def _is_straggler(rank: RankSummary, ranks: Sequence[RankSummary]) -> bool:
    """Compare with ranks of equal work, because stages of a pipeline differ by design.

    A rank that a strategy leaves out has no work and is no straggler.
    """
    if not rank.busy_s or rank.flops == 0:
        return False
    peers = [other for other in ranks if other.busy_s and _has_equal_work(other, rank)]
    return min(map(_s_per_work, peers)) / _s_per_work(rank) < STRAGGLER_BELOW


def _has_equal_work(a: RankSummary, b: RankSummary) -> bool:
    if a.stages != b.stages or a.flops is None or b.flops is None:
        return a.stages == b.stages and a.flops is b.flops
    return math.isclose(a.flops, b.flops, rel_tol=_EQUAL_WORK)


def _s_per_work(rank: RankSummary) -> float:
    """Busy seconds, per FLOP if FLOPs were counted."""
    assert rank.busy_s is not None
    return rank.busy_s / (rank.flops or 1.0)

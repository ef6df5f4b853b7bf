"""A row for each strategy of equal model, batch and dtype, over its repeats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.domain.run import Headed, Status
from harness.measure.derive.training import TrainingSummary, configured
from harness.measure.statistics import Summary, Verdict, summarize, verdict

# Settings that define a strategy or its search; compared runs agree in all others.
_COMPARED = (
    "strategy", "strategy_digest", "engine", "n_ranks", "schedule", "microbatches", "asynchronous",
    "recompute", "predict", "search_seconds", "search_budget", "trials", "memory",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """One strategy on some ranks, over its repeats that ended ok.

    Attributes:
        workload: model, dtype and batch; only rows of one workload are compared.
        n_started: repeats, including failed ones.
        failures: the status of each repeat that did not end ok.
        step_s: the median step of each repeat that ended ok; empty when none did.
        throughput: samples per second of the job, at the median of `step_s`.
        interval: of `step_s`, or of the steps of the only repeat.
        run_ids: of the repeats that ended ok.
        exposed_share: share of exposed communication in the mean step, median over repeats.
        sent_bytes: bytes that the busiest rank sends in a step, median over repeats.
        against: the baseline of `speedup` and `verdict`; empty for the baseline itself.
    """

    workload: str
    name: str
    n_ranks: int
    n_started: int
    failures: tuple[Status, ...]
    step_s: tuple[float, ...]
    throughput: float | None
    interval: Summary | None = None
    run_ids: tuple[str, ...] = ()
    exposed_share: float | None = None
    sent_bytes: float | None = None
    against: str = ""
    speedup: float | None = None
    verdict: Verdict | None = None

    @property
    def strategy(self) -> str:
        """The name with the number of ranks: `ddp on 5`."""
        return f"{self.name} on {self.n_ranks}"

    @property
    def median_s(self) -> float | None:
        """Median of `step_s`; None when no repeat ended ok."""
        return median(self.step_s) if self.step_s else None


def strategy_table(
    runs: Sequence[tuple[Headed, TrainingSummary]], *, at_least: int = 2
) -> list[StrategyRow]:
    """The rows of `strategy_tables` in one list.

    Args:
        at_least: leave out workloads with fewer strategies.
    """
    return [row for rows in strategy_tables(runs) if len(rows) >= at_least for row in rows]


def strategy_tables(runs: Iterable[tuple[Headed, TrainingSummary]]) -> list[list[StrategyRow]]:
    """For each workload a row per strategy; the baseline is the first with a number.

    The baseline is plain `single`, else the first strategy with a run that ended ok.
    """
    workloads: dict[str, list[tuple[Headed, TrainingSummary]]] = {}
    for run, summary in runs:
        workloads.setdefault(_rest_of_config(run), []).append((run, summary))
    return [_compared(group) for group in workloads.values()]


def _rest_of_config(run: Headed) -> str:
    rest = {name: v for name, v in run.header.config.items() if name not in _COMPARED}
    return json.dumps([rest, _kind_of(run)], sort_keys=True)


def _kind_of(run: Headed) -> str:
    """Kind of the first device, which every strategy uses."""
    return run.header.ranks[0].device_kind if run.header.ranks else ""


def _compared(group: Sequence[tuple[Headed, TrainingSummary]]) -> list[StrategyRow]:
    by_strategy: dict[tuple[bool, str, int, str], list[tuple[Headed, TrainingSummary]]] = {}
    for run, summary in group:
        # Plain `single` first, then by name, because repeats run in random order.
        name, digest = summary.strategy, configured(run, "strategy_digest")
        place = (name != "single", name, summary.n_ranks, digest)
        by_strategy.setdefault(place, []).append((run, summary))
    rows = [_row(by_strategy[place]) for place in sorted(by_strategy)]
    baseline = next((row for row in rows if row.step_s), None)
    return rows if baseline is None else [_against(baseline, row) for row in rows]


def _row(repeats: Sequence[tuple[Headed, TrainingSummary]]) -> StrategyRow:
    first_run, first = repeats[0]
    ok = [summary for _, summary in repeats if summary.status == "ok"]
    timed = [(s, s.duration) for s in ok if s.duration is not None]
    steps = tuple(duration.median for _, duration in timed)
    n_samples = next((summary.n_samples for summary in ok if summary.n_samples), None)
    return StrategyRow(
        workload=f"{first.model} {first.dtype} batch {first_run.header.config.get('batch', '?')}",
        name=first.strategy,
        n_ranks=first.n_ranks,
        n_started=len(repeats),
        failures=tuple(summary.status for _, summary in repeats if summary.status != "ok"),
        step_s=steps,
        throughput=n_samples / median(steps) if n_samples and steps else None,
        interval=_interval(ok, steps),
        run_ids=tuple(summary.run_id for summary in ok),
        exposed_share=_median(_exposed_share(summary) for summary in ok),
        sent_bytes=_median(
            summary.sent_bytes_per_s and summary.sent_bytes_per_s * duration.median
            for summary, duration in timed
        ),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _exposed_share(summary: TrainingSummary) -> float | None:
    step_s = sum(summary.phases.values())
    return summary.phases["exposed_communication"] / step_s if step_s else None


def _interval(repeats: Sequence[TrainingSummary], steps: Sequence[float]) -> Summary | None:
    if len(steps) > 1:
        return summarize(steps)
    return repeats[0].duration if repeats else None


def _against(baseline: StrategyRow, row: StrategyRow) -> StrategyRow:
    if row is baseline or not row.step_s:
        return row
    return replace(
        row,
        against=baseline.strategy,
        speedup=median(baseline.step_s) / median(row.step_s),
        verdict=verdict(row.step_s, baseline.step_s),
    )

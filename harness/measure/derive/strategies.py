"""Strategies of equal model, batch and dtype: a row for each, over its repeats, and one sentence.

The sentence says which is fastest, which are no gain, and why; it claims no more than the verdicts.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from harness.domain.run import STATUS_WORDS, Headed, Status
from harness.inputs import by_number
from harness.measure.derive.settings import (
    ONE_DEVICE,
    configured,
    own_settings,
    rest_of_config,
    told_apart,
    told_within,
)
from harness.measure.derive.training import TrainingSummary, rate_over_repeats
from harness.measure.statistics import Summary, Verdict, known_median, summarize, verdict
from harness.units import format_bytes, format_number


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """One strategy on some ranks, over its repeats that ended ok.

    Attributes:
        workload: model, dtype and batch; only rows of one workload are compared.
        settings: those, or the run, that tell it from others of its name; empty without others.
        n_started: repeats, including failed ones.
        failures: the status of each repeat that did not end ok.
        step_s: the median step of each repeat that ended ok; empty when none did.
        unit: of `step_s`: `step`, or `epoch` where only epochs were logged.
        throughput: samples per second of the job, at the median of `step_s`.
        interval: of `step_s`, or of the steps of the only repeat.
        run_ids: of the repeats that ended ok.
        exposed_share: share of exposed communication in the mean step of the repeats.
        sent_bytes: bytes that the busiest interface, which ranks of a host share, sends in a step;
            median over repeats.
        plan: what was searched, in words; empty for other strategies.
        is_of_baseline: it trains the baseline's plan, so that an inconclusive verdict says nothing.
        against: the baseline of `speedup` and `verdict`; empty for the baseline itself.
    """

    workload: str
    name: str
    n_ranks: int
    n_started: int
    failures: tuple[Status, ...]
    step_s: tuple[float, ...]
    throughput: float | None
    settings: str = ""
    unit: Literal["step", "epoch"] = "step"
    interval: Summary | None = None
    run_ids: tuple[str, ...] = ()
    exposed_share: float | None = None
    sent_bytes: float | None = None
    plan: str = ""
    is_of_baseline: bool = False
    against: str = ""
    speedup: float | None = None
    verdict: Verdict | None = None

    @property
    def strategy(self) -> str:
        """The name with the number of ranks, and settings: `ddp on 5`."""
        return " · ".join(filter(None, (f"{self.name} on {self.n_ranks}", self.settings)))

    @property
    def ratio(self) -> str:
        """The speed-up in two digits or more; empty for the baseline."""
        if self.speedup is None:
            return ""
        return f"{self.speedup:.2f}" if self.speedup >= 0.1 else f"{self.speedup:.2g}"

    @property
    def median_s(self) -> float | None:
        """Median of `step_s`; None when no repeat ended ok."""
        return median(self.step_s) if self.step_s else None


def strategy_tables(runs: Iterable[tuple[Headed, TrainingSummary]]) -> list[list[StrategyRow]]:
    """For each workload a row per strategy; the baseline is the first with a number. Workloads of
    equal names are followed by the settings that differ.

    The baseline is plain `single`, else `single` by another engine or flag, else the first strategy
    with a run that ended ok.
    """
    workloads: dict[str, list[tuple[Headed, TrainingSummary]]] = {}
    for run, summary in runs:
        workloads.setdefault(workload_key(run), []).append((run, summary))
    tables = [_compared(group) for group in workloads.values()]
    settings = [rest_of_config(group[0][0]) for group in workloads.values()]
    names = told_apart([rows[0].workload for rows in tables], settings)
    return [
        [replace(row, workload=name) for row in rows]
        for rows, name in zip(tables, names, strict=True)
    ]


def workload_key(run: Headed) -> str:
    """Equal for runs whose strategies are compared."""
    return json.dumps([rest_of_config(run), _kind_of(run)], sort_keys=True)


def _kind_of(run: Headed) -> str:
    """Kind of the first device, which every strategy uses."""
    return run.header.ranks[0].device_kind if run.header.ranks else ""


def _compared(group: Sequence[tuple[Headed, TrainingSummary]]) -> list[StrategyRow]:
    by_strategy: dict[tuple[bool, bool, str, int, str], list[tuple[Headed, TrainingSummary]]] = {}
    for run, summary in group:
        # Plain `single` first, then by name, because repeats run in random order.
        name, own = summary.strategy, json.dumps(own_settings(run), sort_keys=True)
        is_single = configured(run, "strategy") == "single"
        place = (name != "single", not is_single, name, summary.n_ranks, own)
        by_strategy.setdefault(place, []).append((run, summary))
    order = sorted(by_strategy, key=lambda p: (*p[:2], by_number(p[2]), p[3], by_number(p[4])))
    rows = _told_apart([by_strategy[place] for place in order])
    baseline = next((row for row in rows if row.step_s), None)
    return rows if baseline is None else [_against(baseline, row) for row in rows]


def _told_apart(
    strategies: Sequence[Sequence[tuple[Headed, TrainingSummary]]],
) -> list[StrategyRow]:
    """A row for each strategy; those of equal names with the settings that differ."""
    rows, firsts = [_row(repeats) for repeats in strategies], [own[0][0] for own in strategies]
    names = [row.strategy for row in rows]
    told = list(zip(names, told_within(names, [own_settings(run) for run in firsts]), strict=True))
    found = []
    for row, run, (name, words) in zip(rows, firsts, told, strict=True):
        run_id = run.header.run_id if told.count((name, words)) > 1 else ""
        found.append(replace(row, settings=" · ".join(filter(None, (words, run_id)))))
    return found


def _row(repeats: Sequence[tuple[Headed, TrainingSummary]]) -> StrategyRow:
    first_run, first = repeats[0]
    ok = [summary for _, summary in repeats if summary.status == "ok"]
    timed = [(s, s.duration) for s in ok if s.duration is not None]
    steps = tuple(duration.median for _, duration in timed)
    return StrategyRow(
        workload=f"{first.model} {first.dtype} batch {first_run.header.config.get('batch', '?')}",
        name=first.strategy,
        n_ranks=first.n_ranks,
        n_started=len(repeats),
        failures=tuple(summary.status for _, summary in repeats if summary.status != "ok"),
        step_s=steps,
        unit=first.unit,
        throughput=rate_over_repeats(ok, "throughput"),
        interval=_interval(ok, steps),
        run_ids=tuple(summary.run_id for summary in ok),
        exposed_share=_exposed_share(ok),
        plan="; or ".join(dict.fromkeys(summary.plan for summary in ok)),
        # A search chose the device on which `single` trains, too.
        is_of_baseline=bool(ok)
        and all((one.plan, one.used_ranks) == (ONE_DEVICE, (0,)) for one in ok),
        sent_bytes=known_median(
            summary.sent_bytes_per_s and summary.sent_bytes_per_s * duration.median
            for summary, duration in timed
        ),
    )


def _exposed_share(repeats: Sequence[TrainingSummary]) -> float | None:
    phases = [summary.phases for summary in repeats if summary.phases]
    step_s = sum(sum(found.values()) for found in phases)
    return sum(found["exposed_communication"] for found in phases) / step_s if step_s else None


def _interval(repeats: Sequence[TrainingSummary], steps: Sequence[float]) -> Summary | None:
    if len(steps) > 1:
        return summarize(steps)
    return repeats[0].duration if repeats else None


def _against(baseline: StrategyRow, row: StrategyRow) -> StrategyRow:
    if row is baseline or not row.step_s:
        return row
    found = verdict(row.step_s, baseline.step_s)
    is_open = found.outcome == "inconclusive"
    is_of_baseline = is_open and row.is_of_baseline and baseline.name == "single"
    return replace(
        row,
        is_of_baseline=is_of_baseline,
        against=baseline.strategy,
        speedup=median(baseline.step_s) / median(row.step_s),
        verdict=None if is_of_baseline else found,
    )


MOST_REPEATS = 100  # most repeats that the sentence advises
_APART = ", ranges apart"
_N_NAMED = 2  # most strategies that are named as no gain, and as failed


def strategy_finding(rows: Sequence[StrategyRow]) -> str:
    """Compare the strategies of one workload in one sentence.

    Args:
        rows: one of `strategy_tables`.
    """
    finding = _Finding(rows)
    failures = _limited(finding.failures(), "failed")
    if not any(row.step_s for row in rows):
        return f"No strategy has a result: {'; '.join(failures)}."
    losses = _limited(finding.losses(), "no faster or undecided")
    return "; ".join([finding.lead(), *losses, *finding.equals(), *failures]) + "."


def _limited(clauses: list[str], rest: str) -> list[str]:
    n_more = len(clauses) - _N_NAMED
    return clauses[:_N_NAMED] + ([f"{n_more} more {rest}"] if n_more > 0 else [])


class _Finding:
    """The clauses of the sentence."""

    def __init__(self, rows: Sequence[StrategyRow]) -> None:
        self._rows = rows
        self._measured = [row for row in rows if row.step_s and not row.is_of_baseline]
        self._n_of_name = Counter(row.name for row in rows)

    def _name(self, row: StrategyRow) -> str:
        if row.name == "single" and row.n_ranks == 1:
            return "one device"
        return row.name if self._n_of_name[row.name] == 1 else row.strategy

    def lead(self) -> str:
        """The fastest strategy, as far as the verdicts decide it."""
        best = min(self._measured, key=lambda row: row.median_s or 0.0)
        if len(self._measured) == 1:
            is_alone = len(self._rows) == 1 or any(row.is_of_baseline for row in self._rows)
            has = "was trained" if is_alone else "has a result"
            rate = f" ({format_number(best.throughput)} samples/s)" if best.throughput else ""
            return f"Only {self._name(best)} {has}{rate}: there is nothing to compare it with"
        return self._lead_of_baseline() if best is self._measured[0] else self._lead_of_other(best)

    def _lead_of_baseline(self) -> str:
        baseline = self._measured[0]
        verdicts = [row.verdict for row in self._measured if row.verdict]
        n_more = max((v.n_more for v in verdicts if v.outcome == "inconclusive"), default=0)
        if not n_more:
            return f"No strategy is faster than {self._name(baseline)}"
        return _undecided(f"{self._name(baseline)} was fastest", baseline, n_more)

    def _lead_of_other(self, best: StrategyRow) -> str:
        name, baseline = self._name(best), self._name(self._measured[0])
        reading, against = f"{best.ratio} times {baseline}", best.verdict
        if against is None or against.outcome in ("inconclusive", "slower"):
            n_more = against.n_more if against else 0
            apart = _APART if against and against.is_apart else ""
            return _undecided(f"{name} was fastest ({reading}{apart})", best, n_more)
        if against.outcome == "same":
            return f"{name} was fastest and is no gain: {reading}, within 10%"
        rivals = [  # strategies that are no loss, and without a verdict that they are slower
            row
            for row in self._measured[1:]
            if row is not best and not _is_loss(row)
            if verdict(best.step_s, row.step_s).outcome != "faster"
        ]
        if rivals:
            leaders = [f"{name} ({reading})"]
            leaders += [f"{self._name(row)} ({row.ratio} times)" for row in rivals]
            names = f"{', '.join(leaders[:-1])} and {leaders[-1]}"
            return f"{names} are fastest: their repeats do not separate them"
        return f"{name} is fastest: {reading}"

    def losses(self) -> list[str]:
        """Strategies that are no faster than the baseline, or whose median is slower; the slowest
        first, with its cause."""
        best = min(self._measured, key=lambda row: row.median_s or 0.0)
        lost = [row for row in self._measured[1:] if row is not best and _is_loss(row)]
        lost.sort(key=lambda row: row.speedup or 0.0)
        causes = [self._cause(row) for row in lost[:1]] + [""] * len(lost[1:])
        return [self._loss(row) + cause for row, cause in zip(lost, causes, strict=True)]

    def _loss(self, row: StrategyRow) -> str:
        is_open = row.verdict is None or row.verdict.outcome == "inconclusive"
        apart = _APART if row.verdict and row.verdict.is_apart else ""
        words = "is undecided" if is_open else "is no gain"
        return f"{self._name(row)} {words} ({row.ratio} times{apart})"

    def _cause(self, row: StrategyRow) -> str:
        """Communication, if the strategy would beat the baseline without exposed communication."""
        baseline_s, step_s, share = self._measured[0].median_s, row.median_s, row.exposed_share
        if not baseline_s or not step_s or not share or step_s * (1 - share) >= baseline_s:
            return ""
        n_bytes = row.sent_bytes
        sent = f", in which the busiest interface sends {format_bytes(n_bytes)}" if n_bytes else ""
        return f": exposed communication is {share:.0%} of its step{sent}"

    def equals(self) -> list[str]:
        """Searches that chose the baseline."""
        found = [row for row in self._rows if row.is_of_baseline]
        return [f"{self._name(row)} chose {self._name(self._measured[0])}, too" for row in found]

    def failures(self) -> list[str]:
        """Strategies without a result, and why."""
        return [f"{self._name(row)} {_ending(row)}" for row in self._rows if not row.step_s]


def _is_loss(row: StrategyRow) -> bool:
    if row.verdict is None or row.speedup is None:
        return False
    was_slower = row.verdict.outcome == "inconclusive" and row.speedup < 1
    return row.verdict.outcome in ("slower", "same") or was_slower


def _undecided(reading: str, row: StrategyRow, n_more: int) -> str:
    if n_more > MOST_REPEATS:
        return f"No verdict: {reading}, but the repeats vary too much to decide it"
    n = len(row.step_s)
    repeats = "1 repeat does" if n == 1 else f"{n} repeats do"
    return f"No verdict yet: {reading}, but {repeats} not decide it (about {n_more} more would)"


def _ending(row: StrategyRow) -> str:
    words = dict.fromkeys(STATUS_WORDS.get(status, status) for status in row.failures)
    if set(row.failures) == {"running"}:
        return f"is {STATUS_WORDS['running']}"
    return f"failed ({', '.join(words) or 'no step was timed'})"

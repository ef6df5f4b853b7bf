"""Strategies against each other: who is the baseline, what compares, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.record import Record, Sample, Span
from harness.domain.run import RankInfo, RunHeader, Status
from harness.measure.derive import StrategyRow, strategy_table, training_summary
from harness.measure.store import Run


def trained(
    strategy: str, n_ranks: int, step_s: float, *, status: Status = "ok", **config: Any
) -> Run:
    """A run of three steps of `step_s` with 12 samples each."""
    names = [f"node{rank}" for rank in range(n_ranks)]
    records: list[Record] = []
    for step in range(3 if status == "ok" else 0):
        records.append(Span(kind="step", start_s=10.0 * step, duration_s=step_s, step=step))
        records.append(
            Sample(metric="n_samples", value=12 / n_ranks, time_s=10.0 * step, step=step)
        )
    devices = {name: Device(name=f"{name}:0", kind="GPU", memory_bytes=1) for name in names}
    header = RunHeader(
        run_id="run", workload="train", key="key", repeat=0, argv=[],
        config={"model": "lenet", "dtype": "fp32", "batch": 12, "engine": "torch",
                "strategy": strategy, "n_ranks": n_ranks, **config},
        cluster=Cluster(nodes=[Node(name=n, devices=[d]) for n, d in devices.items()]),
        ranks=[
            RankInfo(rank=rank, hostname=name, device="cuda:0", device_kind="GPU", n_cores=1,
                     memory_bytes=1)
            for rank, name in enumerate(names)
        ],
        versions={}, commit="", start_utc="2026-01-01T00:00:00Z", status=status,
    )  # fmt: skip
    return Run(path=Path("run"), header=header, ranks=dict.fromkeys(range(n_ranks), records))


def table(*runs: Run) -> list[StrategyRow]:
    return strategy_table([(run, training_summary(run)) for run in runs])


def test_single_is_the_baseline_in_whatever_order_runs_were_carried_out() -> None:
    ddp, single = trained("ddp", 2, 1.0), trained("single", 1, 3.0)
    first, second = table(ddp, single)
    assert (first.strategy, first.speedup, first.verdict) == ("single on 1", None, None)
    assert (second.strategy, second.against) == ("ddp on 2", "single on 1")
    assert second.speedup == 3.0
    assert (first.throughput, second.throughput) == (4.0, 12.0)
    assert second.workload == "lenet fp32 batch 12"


def test_one_repeat_each_is_inconclusive_and_says_how_many_more() -> None:
    row = table(trained("single", 1, 3.0), trained("ddp", 2, 1.0))[1]
    assert row.verdict is not None
    assert row.verdict.outcome == "inconclusive"
    # The fewest of each side whose full separation reads p < 0.002 are 7.
    assert row.verdict.n_more == 6


def test_separate_repeats_are_faster_by_the_ratio_of_their_medians() -> None:
    singles = [trained("single", 1, 3.0 + 0.01 * i) for i in range(9)]
    ddps = [trained("ddp", 2, 1.0 + 0.01 * i) for i in range(9)]
    row = table(*singles, *ddps)[1]
    assert row.verdict is not None
    assert (row.verdict.outcome, len(row.step_s), row.n_started) == ("faster", 9, 9)
    assert row.speedup == pytest.approx(3.04 / 1.04)


def test_a_failed_repeat_counts_as_started_only() -> None:
    failed = trained("ddp", 2, 1.0, status="oom")
    rows = table(trained("single", 1, 3.0), trained("ddp", 2, 1.0), failed)
    assert (rows[1].step_s, rows[1].n_started) == ((1.0,), 2)


def test_a_strategy_that_always_fails_keeps_its_row_and_the_others_compare() -> None:
    single, ddp = trained("single", 1, 3.0, status="oom"), trained("ddp", 2, 1.0)
    rows = table(single, ddp, trained("ddp", 4, 0.5))
    assert [(row.strategy, row.against) for row in rows] == [
        ("single on 1", ""),
        ("ddp on 2", ""),
        ("ddp on 4", "ddp on 2"),
    ]


def test_unlike_batches_do_not_compare() -> None:
    assert table(trained("single", 1, 3.0), trained("ddp", 2, 1.0, batch=24)) == []


def test_engines_are_strategies_of_their_own() -> None:
    rows = table(trained("ddp", 2, 1.0), trained("ddp", 2, 2.0, engine="deepspeed"))
    assert [row.strategy for row in rows] == ["ddp on 2", "deepspeed-ddp on 2"]

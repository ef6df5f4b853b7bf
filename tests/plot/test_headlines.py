"""The report's first screen: answers and warnings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.domain.record import Sample
from harness.measure.store import find_runs
from harness.plot.catalog import Catalog, read_catalog
from harness.plot.figures import load_figure
from harness.plot.headlines import Answer, answers, warnings

Write = Callable[..., Path]


def catalog_of(root: Path) -> Catalog:
    return read_catalog(*find_runs(root))


def strategies(answer: Answer) -> list[str]:
    return [row.strategy for _, row in answer.rows]


def test_strategies_of_unlike_clusters_are_not_one_comparison(
    tmp_path: Path, write: Write, header: Any, cluster: Any, trained: Any, configured: Any
) -> None:
    """One device alone is the baseline on both networks."""
    alone = header("train", configured("single", 32), cluster(1, None), run_id="single")
    write(tmp_path, alone, trained(1, 32, 0.2, 0.0))
    for name, nic, exposed_s in (("slow", 1.25e7, 0.3), ("fast", 1.25e8, 0.1)):
        run = header("train", configured("ddp", 32), cluster(2, nic), run_id=name)
        write(tmp_path, run, trained(2, 32, 0.1, exposed_s))
    found = answers(catalog_of(tmp_path))
    assert [strategies(answer) for answer in found] == [["single on 1", "ddp on 2"]] * 2
    assert len({answer.cell for answer in found}) == 2
    faster, slower = sorted(answer.rows[1][1].median_s or 0.0 for answer in found)
    assert slower - faster > 0.19
    assert all(answer.rows[1][1].against == "single on 1" for answer in found)


def test_without_two_strategies_of_one_cell_there_is_no_comparison(
    tmp_path: Path, write: Write, header: Any, cluster: Any, trained: Any, configured: Any
) -> None:
    write(tmp_path, header("links", {}, cluster(3), run_id="links"), {})
    (none,) = answers(catalog_of(tmp_path))
    assert none.sentence == ("No strategies to compare: there is no training run in these results.")
    assert none.rows == ()
    for batch, sentence in (
        (32, "Only ddp was trained ("),
        (64, "No strategies to compare: each of 2 cells was trained by one strategy."),
    ):
        run = header("train", configured("ddp", batch), cluster(2), run_id=f"ddp-{batch}")
        write(tmp_path, run, trained(2, batch, 0.1, 0.1))
        (answer,) = answers(catalog_of(tmp_path))
        assert answer.sentence.startswith(sentence)
    assert strategies(answer) == ["ddp on 2", "ddp on 2"]
    assert [cell.split(" · ")[1] for cell, _ in answer.rows] == ["batch 32", "batch 64"]


def test_warnings_are_of_every_workload_and_folded_by_kind(
    tmp_path: Path, write: Write, header: Any, cluster: Any, trained: Any, configured: Any
) -> None:
    left_out = {"left_out": ["send_recv: one rank has nobody to send to"]}
    write(tmp_path, header("links", {}, cluster(3), run_id="links", summary=left_out), {})
    labels: dict[str, Any] = {"m": 8, "n": 8, "k": 8, "dtype": "bf16", "reason": "no kernel"}
    skipped = {0: [Sample(metric="matmul_skipped", value=1, labels=labels)]}
    write(tmp_path, header("matmul", {}, cluster(3), run_id="matmul"), skipped)
    for repeat in range(5):
        run = header(
            "train", configured("ddp", 32), cluster(2), run_id=f"ddp-{repeat}", repeat=repeat,
            versions={"torch": "2.13.0" if repeat else "2.12.0"},
        )  # fmt: skip
        write(tmp_path, run, trained(2, 32, 0.1, 0.1))
    named = ", ".join(f"resnet50 ddp on 2 (ddp-{repeat})" for repeat in range(3))
    found = warnings(catalog_of(tmp_path))
    assert list(found) == [
        "Steps are few or vary",
        "Outlier steps",
        "Measurements left out",
        "Versions differ between runs",
    ]
    assert found["Outlier steps"] == [f"{named} and 2 more: 1 step far above the others"]
    assert found["Measurements left out"] == [
        "3 × RTX 3070, 1 Gbit/s · bf16 n = 8: ranks 0: no kernel",
        "links: send_recv: one rank has nobody to send to",
    ]
    assert found["Versions differ between runs"] == [
        "runs disagree on the version of torch: 2.12.0, 2.13.0"
    ]


def test_the_answer_and_the_figure_have_the_same_throughput() -> None:
    """Of an even number of repeats, where the median of rates is not the rate of the median."""
    catalog = catalog_of(Path(__file__).parents[2] / "results")
    drawn = load_figure("throughput").table(catalog)
    by_strategy = dict(zip(drawn["strategy"], drawn["throughput_samples_per_s"], strict=True))
    (answer,) = answers(catalog)
    assert {len(row.step_s) for _, row in answer.rows} == {2}
    assert by_strategy == pytest.approx({row.name: row.throughput for _, row in answer.rows})

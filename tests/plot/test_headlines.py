"""The report's first table and its warnings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.domain.record import Sample
from harness.measure.store import find_runs
from harness.plot.catalog import read_catalog
from harness.plot.headlines import compared_strategies, warnings

Write = Callable[..., Path]


def test_strategies_of_unlike_clusters_are_not_one_row(
    tmp_path: Path, write: Write, header: Any, cluster: Any, trained: Any, configured: Any
) -> None:
    """One device alone is the baseline on both networks."""
    alone = header("train", configured("single", 32), cluster(1, None), run_id="single")
    write(tmp_path, alone, trained(1, 32, 0.2, 0.0))
    for name, nic, exposed_s in (("slow", 1.25e7, 0.3), ("fast", 1.25e8, 0.1)):
        run = header("train", configured("ddp", 32), cluster(2, nic), run_id=name)
        write(tmp_path, run, trained(2, 32, 0.1, exposed_s))
    table = compared_strategies(read_catalog(*find_runs(tmp_path)))
    assert list(table["label"]) == ["single on 1", "ddp on 2"] * 2
    assert len(set(table["cell"])) == 2
    faster, slower = sorted(table["step_s"][table["label"] == "ddp on 2"])
    assert slower - faster > 0.19
    assert all("against single on 1" in text for text in table["verdict"] if text)


def test_a_strategy_without_a_number_keeps_its_row(planned: Path) -> None:
    table = compared_strategies(read_catalog(*find_runs(planned)))
    failed = table[table["status"] == "failed"].iloc[0]
    assert (failed["label"], failed["repeats"]) == ("tensor on 5", "0 of 1")
    assert table["label"].iloc[0] == "single on 1"
    assert list(table["repeats"][table["label"] == "ddp on 5"]) == ["2"]


def test_warnings_are_of_every_workload(
    tmp_path: Path, write: Write, header: Any, cluster: Any
) -> None:
    left_out = {"left_out": ["send_recv: one rank has nobody to send to"]}
    write(tmp_path, header("links", {}, cluster(3), run_id="links", summary=left_out), {})
    labels: dict[str, Any] = {"m": 8, "n": 8, "k": 8, "dtype": "bf16", "reason": "no kernel"}
    skipped = {0: [Sample(metric="matmul_skipped", value=1, labels=labels)]}
    write(tmp_path, header("matmul", {}, cluster(3), run_id="matmul"), skipped)
    assert warnings(read_catalog(*find_runs(tmp_path))) == [
        "3 × RTX 3070, 1 Gbit/s · bf16 n = 8: skipped: ranks 0: no kernel",
        "links: left out: send_recv: one rank has nobody to send to",
    ]

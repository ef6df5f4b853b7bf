"""What the report begins with: strategies against each other, and what speaks against them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.measure.derive import (
    StrategyRow,
    low_peak_warnings,
    strategy_table,
)
from harness.measure.derive.host import warnings_of_shares
from harness.measure.text import interval_words
from harness.plot.catalog import Catalog
from harness.plot.cells import cells

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = [
    "cell",
    "label",
    "status",
    "reason",
    "repeats",
    "throughput_samples_per_s",
    "step_s",
    "interval",
    "speed-up",
    "verdict",
]


def compared_strategies(catalog: Catalog) -> pd.DataFrame:
    """A row per strategy of each cell with two or more, as rank 0's last table has it."""
    import pandas as pd

    rows = []
    for cell, cases in sorted(cells(catalog.training).items()):
        repeats = [
            (run, summary)
            for case in cases
            for run, summary in zip(case.case.runs, case.summaries, strict=True)
        ]
        rows += [_row(cell, row) for row in strategy_table(repeats)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(cell: str, row: StrategyRow) -> dict[str, Any]:
    n_ok, n_started = len(row.step_s), row.n_started
    return {
        "cell": cell,
        "label": row.strategy,
        "status": "ok" if n_ok else "failed",
        "reason": "",
        "repeats": str(n_ok) if n_ok == n_started else f"{n_ok} of {n_started}",
        "throughput_samples_per_s": row.throughput,
        "step_s": row.median_s,
        "interval": interval_words(row.interval) if row.interval else "",
        "speed-up": row.speedup,
        "verdict": f"against {row.against}: {row.verdict}" if row.verdict else "",
    }


def warnings(catalog: Catalog) -> list[str]:
    """All that speaks against the numbers, of every workload."""
    from harness.plot.figures.matmul import skipped_products

    found = []
    for trained in catalog.training:
        for run, summary in zip(trained.case.runs, trained.summaries, strict=True):
            found += [f"{run.header.run_id}: {text}" for text in summary.warnings]
    for case in catalog.cases("matmul"):
        skipped = skipped_products(case) if case.is_ok else []
        found += [f"{row['label']}: skipped: {row['reason']}" for row in skipped]
        for run in case.runs if case.is_ok else ():
            if run.header.status != "ok":
                continue
            doubts = low_peak_warnings(catalog.distributed(run))
            found += [f"{run.header.run_id}: {text}" for text in doubts]
    runs = catalog.runs
    left_out = [(run.header, text) for run in runs for text in run.header.texts("left_out")]
    found += [f"{header.run_id}: left out: {text}" for header, text in left_out]
    found += warnings_of_shares((run, run.stolen) for run in runs)
    commits = {run.header.commit for run in runs if run.header.commit}
    if len(commits) > 1:
        found.append(f"runs of {len(commits)} commits stand side by side")
    return found

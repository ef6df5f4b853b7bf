"""Check that phases sum to the step, and that two estimates of exposed communication agree.

    mpirun -np 5 --hostfile hosts/virtual.txt ./entry.sh train --strategy ddp --steps 30 \\
        --no-sync-steps 30 --repeats 5 --results RESULTS
    python benchmarks/phases.py RESULTS

Reads the train runs of a results directory; each comparison pairs values of one run: the sum of a
step's phases over its wall time (one pair per step), and exposed communication by the union of
spans over the median step minus the median step without synchronisation (one pair per repeat). The
second ratio differs from 1 if communication slows concurrent computing. A third comparison
therefore adds this contention, from computing in steps with and without synchronisation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from comparison import compare, show

from harness.errors import ResultsError, run_command
from harness.measure.derive.spans import phase_table
from harness.measure.derive.training import training_summary
from harness.measure.store import Run, find_runs, read_run


@dataclass(frozen=True, kw_only=True)
class Options:
    results: tyro.conf.Positional[Path]
    """Results directory with train runs of ddp."""
    json: bool = False
    """Print one JSON object per comparison."""


def place(run: Run) -> str:
    """A description of the machines of a run."""
    cluster = run.header.cluster
    node = cluster.nodes[0]
    nic = f", {node.nic_bytes_per_s * 8e-9:g} Gbit/s" if node.nic_bytes_per_s else ""
    return f"{len(cluster.nodes)} nodes of {node.devices[0].kind}{nic}"


def phase_sums(runs: list[Run]) -> tuple[list[float], list[float]]:
    """Sums of the named phases, and the wall times of the same steps, over all ranks."""
    named: list[float] = []
    walls: list[float] = []
    for table in (phase_table(records) for run in runs for records in run.ranks.values()):
        named += (table.step_s - table.phases["other"]).tolist()
        walls += table.step_s.tolist()
    return named, walls


def exposed_readings(runs: list[Run]) -> tuple[list[float], list[float], list[float]]:
    """By run: exposed communication by spans, by difference, and contention."""
    summaries = [training_summary(run) for run in runs]
    found = [
        (s.exposed_communication_s, s.no_sync_exposed_s, s.slowed_compute_s)
        for s in summaries
        if s.exposed_communication_s is not None
        and s.no_sync_exposed_s is not None
        and s.slowed_compute_s is not None
    ]
    if not found:
        raise ResultsError("no run has steps without synchronisation: run with --no-sync-steps 30")
    by_spans, by_difference, slowed = zip(*found, strict=True)
    return list(by_spans), list(by_difference), list(slowed)


def main(options: Options) -> int:
    runs = [
        read_run(path, header)[0]
        for path, header in find_runs(options.results)[0]
        if header.workload == "train" and header.status == "ok" and len(header.ranks) > 1
    ]
    if not runs:
        raise ResultsError(f"{options.results} holds no ok train run on several ranks: run one")
    where = place(runs[0])
    by_spans, by_difference, slowed = exposed_readings(runs)
    both = [a + b for a, b in zip(by_spans, slowed, strict=True)]
    comparisons = [
        compare("sum of phases / step", *phase_sums(runs), place=where),
        compare("exposed by spans / by no_sync", by_spans, by_difference, place=where),
        compare("exposed and slowed compute / by no_sync", both, by_difference, place=where),
    ]
    show(comparisons, as_json=options.json)
    return 0


if __name__ == "__main__":
    given = tyro.cli(Options, description=__doc__)
    sys.exit(run_command("error", lambda: main(given)))

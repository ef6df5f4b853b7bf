"""Plan published graphs of operators, and compare with the exact optimum of contiguous stages.

    python benchmarks/maxload.py DIR [--devices 2 4] [--effort 4] [--json]

DIR holds graphs as placement_graphs.py reads them, such as throughput-inputs of
github.com/msr-fiddle/dnn-partitioning. Each graph is planned in a separate process on the number of
accelerators that its file names, or on those of --devices. Times are per sample. "contiguous" is
the dynamic program's load of the busiest device, "exact" says whether no contiguous plan is better;
"anywhere" is the best found where the operators of a device need not be contiguous, and "bound" is
a load that no plan is below.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from comparison import compare_extremes
from placement_graphs import read_problem

from harness.measure.peak_rss import peak_rss_bytes
from harness.measure.text import table
from harness.plan.published.maxload.problem import LoadProblem
from harness.plan.published.maxload.search import search


class Row(NamedTuple):
    """One graph on one number of devices."""

    graph: str
    n_devices: int
    n_operators: int
    n_sets: int
    contiguous_s: float
    is_exact: bool
    anywhere_s: float
    bound_s: float
    cpu_s: float
    peak_bytes: int

    def cells(self) -> list[str]:
        return [
            self.graph,
            str(self.n_devices),
            str(self.n_operators),
            str(self.n_sets),
            f"{self.contiguous_s * 1e3:.3f}",
            "yes" if self.is_exact else "NO",
            f"{self.anywhere_s * 1e3:.3f}",
            f"{self.anywhere_s / self.contiguous_s - 1:.1%}",
            f"{self.bound_s * 1e3:.3f}",
            f"{self.anywhere_s / self.bound_s - 1:.1%}",
            f"{self.cpu_s:.1f}",
            f"{self.peak_bytes / 2**20:.0f}",
        ]


HEADER = ["graph", "devices", "operators", "closed sets", "contiguous ms", "exact", "anywhere ms",
          "less", "bound ms", "gap", "CPU s", "peak MiB"]  # fmt: skip


class Case(NamedTuple):
    """A graph's file, the number of devices (its own when None), and the annealing."""

    path: Path
    n_devices: int | None
    effort: float


def _max_load_s(problem: LoadProblem, device_of: Sequence[int]) -> float:
    """Of the busiest device of a placement."""
    own = [{i for i, d in enumerate(device_of) if d == device} for device in set(device_of)]
    return max(problem.load_s(operators) for operators in own)


def measure(case: Case) -> Row:
    """Plan one graph."""
    path, n_devices, effort = case
    problem = read_problem(path, n_devices)
    start_s = time.process_time()
    found = search(problem, effort=effort)
    cpu_s = time.process_time() - start_s
    if found is None:
        raise SystemExit(f"{path}: no contiguous plan fits the memory of {problem.n_devices}")
    return Row(
        graph=f"{path.parent.name}/{path.stem}",
        n_devices=problem.n_devices,
        n_operators=problem.n_operators,
        n_sets=found.n_sets,
        contiguous_s=_max_load_s(problem, found.contiguous.device_of),
        is_exact=found.is_exact,
        anywhere_s=_max_load_s(problem, found.free.device_of),
        bound_s=found.bound_s,
        cpu_s=cpu_s,
        peak_bytes=peak_rss_bytes(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="of graphs, searched with its folders")
    parser.add_argument("--devices", type=int, nargs="+", help="default: as each file says")
    parser.add_argument("--effort", type=float, default=1.0, help="of annealing; 0 for none")
    parser.add_argument("--json", action="store_true", help="one object per comparison")
    args = parser.parse_args()
    cases = [
        Case(path, n, args.effort)
        for path in sorted(args.directory.rglob("*.json"))
        for n in args.devices or [None]
    ]
    if not cases:
        parser.error(f"{args.directory} holds no .json file")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = []
        for row in pool.imap(measure, cases):
            rows.append(row)
            if args.json:
                print(json.dumps(comparison(row)), flush=True)
    out = sys.stderr if args.json else sys.stdout
    print("\n".join(table(HEADER, [row.cells() for row in rows])), file=out)


def comparison(row: Row) -> dict[str, object]:
    """Contiguous stages with operators anywhere, and all numbers of the row."""
    name = f"maxload {row.graph} on {row.n_devices}, contiguous optimum over anywhere"
    more = {key: value for key, value in row._asdict().items() if key != "graph"}
    return compare_extremes(name, [row.contiguous_s / row.anywhere_s], **more)


if __name__ == "__main__":
    main()

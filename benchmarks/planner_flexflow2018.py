"""Search with FlexFlow's 2018 cost model on its AlexNet, and compare with published figures.

    python benchmarks/planner_flexflow2018.py [--seeds 20] [--json] [--quick]

Prints for each topology: data parallelism (must equal the published digits), the worst and best
step over all seeds against the best published one, and proposals per CPU second against the best
published rate. Compilation is not timed. The rate of each seed is compared with the published
figure, which was measured on one core at another time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import dataclass, replace

from comparison import compare

from harness.domain.cluster import Cluster
from harness.plan.costs import PlanRequest
from harness.plan.published.flexflow2018.search import problem_of, search
from harness.plan.published.flexflow2018.simulation import step_ms

BUDGET = 250_000


@dataclass(frozen=True, kw_only=True)
class Listed:
    """The best published figures of a topology, and the required multiple of their rate."""

    n_nodes: int
    n_devices: int
    data_parallel_ms: str = ""
    best_ms: float = 0.0
    proposals_per_s: float = 0.0
    factor: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.n_nodes}x{self.n_devices}"


LISTED = [
    Listed(n_nodes=1, n_devices=2, data_parallel_ms="102.147", best_ms=47.304,
           proposals_per_s=176_000, factor=1),
    Listed(n_nodes=1, n_devices=4, data_parallel_ms="218.664", best_ms=52.012,
           proposals_per_s=35_000, factor=5),
    Listed(n_nodes=2, n_devices=4, data_parallel_ms="451.692", best_ms=64.615,
           proposals_per_s=12_900, factor=10),
    Listed(n_nodes=4, n_devices=4, data_parallel_ms="917.718", best_ms=86.035,
           proposals_per_s=3_400, factor=10),
]  # fmt: skip
LARGE = [Listed(n_nodes=8, n_devices=8), Listed(n_nodes=16, n_devices=4)]


def run_topology(listed: Listed, n_seeds: int, budget: int) -> list[dict[str, object]]:
    """Run all seeds of a topology and print its lines; returns the comparisons."""
    cluster = Cluster.uniform(
        listed.n_nodes, listed.n_devices, inside_bytes_per_s=1.0, memory_bytes=2**40
    )
    request = PlanRequest(cluster=cluster, budget=10)
    problem = problem_of(request)
    search(problem, request)  # compiles or loads compiled code
    found = [search(problem, replace(request, budget=budget, seed=k)) for k in range(n_seeds)]
    data_parallel = f"{step_ms(problem, problem.data_parallel()):.3f}"
    is_right = data_parallel == (listed.data_parallel_ms or data_parallel)
    steps = [step_ms(problem, one.plan) for one in found]
    per_s = [one.n_proposals / one.cpu_s for one in found]
    row = [
        listed.name,
        data_parallel + ("" if is_right else " (!)"),
        f"{max(steps):.3f}",
        f"{min(steps):.3f}",
        f"{listed.best_ms:.3f}" if listed.best_ms else "-",
        f"{statistics.median(per_s):,.0f}",
        f"{listed.proposals_per_s * listed.factor:,.0f}" if listed.best_ms else "-",
        f"{sum(one.n_bounded for one in found) / sum(one.n_proposals for one in found):.0%}",
        f"{max(one.cpu_s for one in found):.2f}",
    ]
    print("".join(f"{cell:>14}" for cell in row), file=sys.stderr if ARGS.json else sys.stdout)
    if not listed.best_ms:
        return []
    return [
        compare(
            f"flexflow2018 step {listed.name}, best listed over ours",
            [listed.best_ms] * n_seeds,
            steps,
        ),
        compare(
            f"flexflow2018 proposals per s {listed.name}, ours over best listed",
            per_s,
            [listed.proposals_per_s] * n_seeds,
        ),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", type=int, default=BUDGET, help="proposals per search")
    parser.add_argument("--json", action="store_true", help="one object per comparison")
    parser.add_argument(
        "--quick", action="store_true", help="3 seeds, 20000 proposals, no 64 devices"
    )
    return parser.parse_args()


HEADS = ["topology", "data parallel", "worst step", "best step", "listed", "proposals/s",
         "asked", "by bound", "worst CPU s"]  # fmt: skip


def main() -> None:
    n_seeds, budget = (3, 20_000) if ARGS.quick else (ARGS.seeds, ARGS.budget)
    out = sys.stderr if ARGS.json else sys.stdout
    print("".join(f"{head:>14}" for head in HEADS), file=out)
    found = [run_topology(listed, n_seeds, budget) for listed in LISTED]
    if not ARGS.quick:
        found += [run_topology(listed, min(3, n_seeds), budget) for listed in LARGE]
    print("times in ms but CPU; 'proposals/s' is the median per CPU second", file=out)
    if ARGS.json:
        for comparison in itertools.chain.from_iterable(found):
            print(json.dumps(comparison))


if __name__ == "__main__":
    ARGS = parse()
    main()

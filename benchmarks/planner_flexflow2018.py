"""Search with FlexFlow's 2018 cost model on its AlexNet, and compare with published figures.

    python benchmarks/planner_flexflow2018.py [--seeds 20] [--json] [--quick]

Prints for each topology: data parallelism (must equal the published digits), the worst and best
step over all seeds against the best published one, and proposals per CPU second against the best
published rate, with and without early rejection by a lower bound (without it, every proposal is
simulated completely). Compilation is not timed. The rate of each seed is compared with the
published figure, which was measured on one core at another time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass

from comparison import compare

from harness.plan.published.flexflow2018.model import LayerProblem, Machine
from harness.plan.published.flexflow2018.search import (
    BEST,
    HOT,
    N_BOUNDED,
    new_chain,
    restart,
    schedule,
    walk,
)
from harness.plan.published.flexflow2018.simulation import build_tables, encode, step_ms

BUDGET = 250_000
FULL = 8  # searches without the bound: the fewest pairs with an interval of 99 %


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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One seed's search.

    Attributes:
        n_bounded: number of proposals rejected before the end of their simulation.
    """

    best_ms: float
    cpu_s: float
    n_proposals: int
    n_bounded: int

    @property
    def proposals_per_s(self) -> float:
        return self.n_proposals / self.cpu_s


def run_trial(problem: LayerProblem, seed: int, budget: int, *, use_bound: bool) -> Trial:
    """Search once."""
    tables = build_tables(problem)
    start = encode(problem.data_parallel(), problem.machine.n_devices)
    chain = new_chain(tables, start, seed)
    restart(chain, start)
    start_s = time.process_time()
    for round_, size, temperature in schedule(budget):  # the planner's
        if temperature == HOT and round_ > 0:
            restart(chain, chain.best.copy())
        walk(chain, size, temperature * float(chain.cost_ms[BEST]), use_bound)
    cpu_s = time.process_time() - start_s
    best_ms, n_bounded = float(chain.cost_ms[BEST]), int(chain.tally[N_BOUNDED])
    return Trial(best_ms=best_ms, cpu_s=cpu_s, n_proposals=budget, n_bounded=n_bounded)


def run_topology(listed: Listed, n_seeds: int, budget: int) -> list[dict[str, object]]:
    """Run all seeds of a topology and print its lines; returns the comparisons."""
    problem = LayerProblem(Machine(listed.n_nodes, listed.n_devices))
    run_trial(problem, 0, 10, use_bound=True)  # compiles or loads compiled code
    data_parallel = f"{step_ms(problem, problem.data_parallel()):.3f}"
    is_right = data_parallel == (listed.data_parallel_ms or data_parallel)
    trials = [run_trial(problem, seed, budget, use_bound=True) for seed in range(n_seeds)]
    full = [run_trial(problem, s, budget // 10, use_bound=False) for s in range(min(n_seeds, FULL))]
    steps = [trial.best_ms for trial in trials]
    row = [
        listed.name,
        data_parallel + ("" if is_right else " (!)"),
        f"{max(steps):.3f}",
        f"{min(steps):.3f}",
        f"{listed.best_ms:.3f}" if listed.best_ms else "-",
        f"{statistics.median(t.proposals_per_s for t in trials):,.0f}",
        f"{statistics.median(t.proposals_per_s for t in full):,.0f}",
        f"{listed.proposals_per_s * listed.factor:,.0f}" if listed.best_ms else "-",
        f"{sum(t.n_bounded for t in trials) / sum(t.n_proposals for t in trials):.0%}",
        f"{max(t.cpu_s for t in trials):.2f}",
    ]
    print("".join(f"{cell:>14}" for cell in row), file=sys.stderr if ARGS.json else sys.stdout)
    if not listed.best_ms:
        return []
    rate = f"flexflow2018 proposals per s {listed.name}"
    best_ms, best_per_s = [listed.best_ms] * n_seeds, [listed.proposals_per_s] * n_seeds
    per_s, full_per_s = ([t.proposals_per_s for t in own] for own in (trials, full))
    return [
        compare(f"flexflow2018 step {listed.name}, best listed over ours", best_ms, steps),
        compare(f"{rate}, ours over best listed", per_s, best_per_s),
        compare(f"{rate} without bound", full_per_s, best_per_s[: len(full)]),
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
         "all simulated", "asked", "by bound", "worst CPU s"]  # fmt: skip


def main() -> None:
    n_seeds, budget = (3, 20_000) if ARGS.quick else (ARGS.seeds, ARGS.budget)
    out = sys.stderr if ARGS.json else sys.stdout
    print("".join(f"{head:>14}" for head in HEADS), file=out)
    found = [run_topology(listed, n_seeds, budget) for listed in LISTED]
    if not ARGS.quick:
        found += [run_topology(listed, min(3, n_seeds), budget) for listed in LARGE]
    print("times in ms but CPU; 'proposals/s' and 'all simulated' are medians per CPU second",
          file=out)  # fmt: skip
    if ARGS.json:
        for comparison in itertools.chain.from_iterable(found):
            print(json.dumps(comparison))


if __name__ == "__main__":
    ARGS = parse()
    main()

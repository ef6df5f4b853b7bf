"""Benchmark the planner under the simulator: oracle, orders, delta, DLRM.

    python benchmarks/planner_simulator.py [oracle orders delta dlrm] [--json] [--quick]

oracle    ratio of step times: searches over the optimum by enumeration, on
          random small problems with branches, different devices and links, and memory limits
orders    ratio of step times of the plans found for layers in a row: the longest over the shortest
          when five unlike nodes stand in other orders
delta     ratio of CPU times: changing one operator in an existing simulation over a new simulation;
          the results must be equal
dlrm      8 tables of 1000000 x 64, MLPs 64-512-512-64 and 576-1024-1024-1024-1, batch 1024, on 4
          devices of 12 GB: the plan found, compared with data parallelism and tables on devices
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from dataclasses import replace
from typing import TextIO

import msgspec
from comparison import compare, compare_extremes
from planner_cases import enumerated_step_s, random_chain, random_request

from harness.domain.cluster import Cluster
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, PlanError
from harness.plan.costs import PlanRequest
from harness.plan.estimates import DeviceRates, DlrmSizes, dlrm_graph, roofline_profile
from harness.plan.portfolio import search_portfolio
from harness.plan.report import describe_strategy, result_lines
from harness.plan.search.space import Space
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import EventTimes, Simulator, Trial
from harness.units import format_duration

P100_12GB = DeviceRates(flops_per_s=9.3e12, memory_bytes_per_s=549e9)  # data sheet


Comparisons = list[dict[str, object]]


def run_oracle(out: TextIO, *, quick: bool) -> Comparisons:
    """Run the oracle section, with at least 200 cases unless quick."""
    n_seeds = 5 if quick else 110
    ratios, n_unfit, n_larger = [], 0, 0.0
    for seed in range(n_seeds):
        for n_ops, n_devices in ((4, 2), (3, 3)):
            request = random_request(seed, n_ops=n_ops, n_devices=n_devices)
            want, size = enumerated_step_s(request)
            n_larger = max(n_larger, size)
            try:
                found = search_portfolio(request).best.step_s
            except PlanError:
                found = math.inf
            if math.isinf(want) and math.isinf(found):
                n_unfit += 1
            else:
                ratios.append(found / want if math.isfinite(want) else 0.0)
    worse = sum(ratio > 1 for ratio in ratios)
    better = sum(ratio < 1 for ratio in ratios)
    print(
        f"oracle: {len(ratios)} random cases of up to {n_larger:.0f} strategies (and {n_unfit} "
        "that "
        f"nothing fits, which both say): {len(ratios) - worse - better} equal to enumeration, "
        f"{better} better by microbatches or pipelines, {worse} worse; worst ratio "
        f"{max(ratios):.6f}\n",
        file=out,
    )
    return [compare_extremes("searched step / enumerated step", ratios)]


def run_orders(out: TextIO, *, quick: bool) -> Comparisons:
    """Run the orders section: three orders of the nodes of each cluster."""
    ratios, all_s = [], []
    for seed in range(1 if quick else 10):
        request = random_chain(seed, n_layers=40, n_nodes=5)
        nodes, steps_s = list(request.cluster.nodes), []
        for order in range(3):
            random.Random(order).shuffle(nodes)
            cluster = msgspec.structs.replace(request.cluster, nodes=list(nodes))
            steps_s.append(search_portfolio(replace(request, cluster=cluster)).best.step_s)
        ratios.append(max(steps_s) / min(steps_s))
        all_s += steps_s
    n_equal = sum(ratio < 1.001 for ratio in ratios)
    print(
        f"orders: {len(ratios)} random clusters; steps of all orders equal to 0.1 % in {n_equal}; "
        f"worst ratio {max(ratios):.3f}; mean step {format_duration(statistics.mean(all_s))}\n",
        file=out,
    )
    return [compare_extremes("longest / shortest step over orders of nodes", ratios)]


def run_delta(out: TextIO, *, quick: bool) -> Comparisons:
    """Run the delta section: random moves on a chain of 40 linear layers, 8 devices.

    Compares CPU seconds, which other programs on the machine hardly affect.
    """
    n_moves = 100 if quick else 2000
    request = random_request(1, n_ops=40, n_devices=8)
    assert request.graph is not None
    assert request.profile is not None
    rng = random.Random(1)
    kept = Simulator(request.graph, request.profile, request.cluster)
    space = Space(kept.costs(8), request.cluster, kept.placed)
    plans = {op: rng.choice(menu) for op, menu in space.menus.items()}
    trial = Trial(kept, Strategy(name="s", batch=8, operators=kept.by_name(plans)))
    trial.outcome()  # compile
    delta_s, full_s = [], []
    for _ in range(n_moves):
        op = rng.choice(kept.placed)
        plans[op] = rng.choice(space.menus[op])
        began = time.process_time()
        trial.replace(op, plans[op])
        delta = trial.outcome()
        delta_s.append(time.process_time() - began)
        began = time.process_time()
        fresh = Simulator(request.graph, request.profile, request.cluster)
        strategy = Strategy(name="s", batch=8, operators=fresh.by_name(plans))
        full = Trial(fresh, strategy).outcome()
        full_s.append(time.process_time() - began)
        _check_equal(delta, full)
    print(
        f"delta: {n_moves} random moves on 40 operators and 8 devices, all exactly equal to the "
        f"full simulation; CPU time each: {format_duration(statistics.median(delta_s))}, "
        f"{format_duration(statistics.median(full_s))} from nothing\n",
        file=out,
    )
    return [compare("delta / full", delta_s, full_s)]


def _check_equal(delta: EventTimes, full: EventTimes) -> None:
    if delta.step_s != full.step_s or (delta.memory_bytes != full.memory_bytes).any():
        raise PlanError(f"{delta.step_s} s is not the full simulation's {full.step_s} s")


def run_dlrm(out: TextIO, *, quick: bool) -> Comparisons:
    """Run the DLRM section: four devices in one node, and four nodes at 10 Gbit/s."""
    graph = dlrm_graph(DlrmSizes())
    profile = roofline_profile(
        graph, {"P100 12 GB": P100_12GB}, n_parts=range(1, 5), n_microbatches=(1, 2, 4, 8, 16)
    )
    options = SimulatorOptions(optimizer_s_per_byte=3 / P100_12GB.memory_bytes_per_s)
    comparisons = []
    for name, n_nodes, n_devices, rate in (
        ("one node, 12 GB/s", 1, 4, 12e9),
        ("four nodes, 10 Gbit/s", 4, 1, 1.25e9),
    ):
        cluster = Cluster.uniform(
            n_nodes,
            n_devices,
            inside_bytes_per_s=rate,
            memory_bytes=12 * 10**9,
            kind="P100 12 GB",
            latency_s=1e-5,
        )
        request = PlanRequest(graph=graph, profile=profile, cluster=cluster, batch=1024)
        if quick:
            request = replace(request, budget=800)
        found = search_portfolio(request, options=options).result()
        assert isinstance(found.strategy, Strategy)
        print(
            f"dlrm, {name}: {describe_strategy(found.strategy, graph)} ({found.method})", file=out
        )
        print(*result_lines(found), "", sep="\n", file=out)
        ratio = 1 / found.speedup_over_ddp
        comparisons.append(compare_extremes(f"dlrm {name}: plan / data parallel", [ratio]))
    return comparisons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"oracle": run_oracle, "orders": run_orders, "delta": run_delta, "dlrm": run_dlrm}
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="which; default: all")
    parser.add_argument("--json", action="store_true", help="one object per comparison")
    parser.add_argument("--quick", action="store_true", help="few cases, to try the program")
    args = parser.parse_args()
    out = sys.stderr if args.json else sys.stdout
    try:
        for name in args.parts or parts:
            for comparison in parts[name](out, quick=args.quick):
                if args.json:
                    print(json.dumps(comparison), flush=True)
    except HarnessError as error:
        sys.exit(f"planner_simulator: {error}")


if __name__ == "__main__":
    main()

"""`python -m harness.plan predict`: the step of one layout, without a search."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec

from harness.domain.checkpoints import MOST_OF_STAGE, with_recomputation
from harness.domain.fingerprint import fingerprint
from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.shard_state import SHARD_STATES
from harness.errors import ConfigError
from harness.measure.store import write_atomically
from harness.plan.cli import check_output, request_from
from harness.plan.flags import SHARD_STATE, add_cluster, add_model
from harness.plan.layouts.degrees import parse_layout, profiled_layout
from harness.plan.portfolio import options_of
from harness.plan.report import memory_lines
from harness.plan.simulate.options import AllReduce
from harness.plan.simulate.report import explain
from harness.plan.simulate.simulator import Simulator
from harness.units import format_count, format_duration, format_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Predict a step of tensor x data x pipeline parallel; write its strategy."
    parser.add_argument(
        "--layout",
        required=True,
        metavar="tp=T,dp=D,pp=P",
        help="degrees, 1 if not named; cuts=6-12 begins stages at these operators, shares=2-1 "
        "gives replicas samples in proportion, devices=0-1-4-5 names devices, parts of a layer "
        "first, then replicas, then stages",
    )
    parser.add_argument("--microbatches", type=int, default=1, metavar="M", help="default: 1")
    names = [name for name in SCHEDULE_NAMES if name != "interleaved"]  # a device has one stage
    parser.add_argument("--schedule", choices=names, default="1f1b", help="default: 1f1b")
    parser.add_argument(
        "--recompute",
        choices=["none", "stages", "segments", "layers"],
        default="none",
        help="forward again before backward: a stage at once, by the segments that need the least "
        "memory, or layer by layer, as the executor does not (default: none)",
    )
    parser.add_argument(
        "--shard-state", choices=SHARD_STATES, default="none", help=f"{SHARD_STATE}; default: none"
    )
    parser.add_argument(
        "--no-overlap", action="store_true", help="gradients are synchronised after backward"
    )
    parser.add_argument(
        "--all-reduce", choices=get_args(AllReduce), default="ring", help="default: ring"
    )
    add_model(parser)
    add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the strategy here")
    parser.set_defaults(
        cost="simulator", search_budget=None, search_seconds=None, start=None, seed=0
    )


def run(args: argparse.Namespace) -> None:
    """Predict the step of one layout, without a search.

    Raises:
        HarnessError: a file is missing or malformed, or the layout suits neither model nor cluster.
    """
    check_output(args.output)
    if args.microbatches < 1:
        raise ConfigError(f"--microbatches {args.microbatches} must be above 0")
    layout = parse_layout(args.layout)
    request = request_from(args)
    graph, profile = request.model()
    if request.batch is None:
        raise ConfigError("the graph does not say its batch: give --batch-size B, samples per step")
    options = replace(
        options_of(profile, request.cluster, request.reduce_dtype),
        overlap=not args.no_overlap,
        all_reduce=args.all_reduce,
        recomputes_ahead=args.recompute != "layers",
    )
    simulator = Simulator(
        graph, profile, request.cluster, options=options, memory_bytes=request.memory_bytes
    )
    strategy = profiled_layout(
        layout, simulator, request.batch, n_microbatches=args.microbatches, schedule=args.schedule
    )
    if args.recompute != "none":
        n_segments = MOST_OF_STAGE if args.recompute == "segments" else 1
        strategy = with_recomputation(strategy, graph, n_segments)
    made_for = fingerprint(graph, request.cluster, profile)
    strategy = msgspec.structs.replace(strategy, shard_state=args.shard_state, made_for=made_for)
    simulation = simulator.simulate(strategy)
    if args.output is not None:
        write_atomically(args.output, strategy.to_json())
    samples_per_s = strategy.batch / simulation.step_s
    if args.json:
        found = {
            "layout": layout.name,
            "step_s": simulation.step_s,
            "samples_per_s": samples_per_s,
            "fits": simulation.fits,
            "memory_bytes": simulation.memory_bytes,
            "strategy": strategy,
        }
        print(msgspec.json.encode(found).decode())
        return
    fits = "" if simulation.fits else "; it does not fit into memory"
    print(
        f"{layout.name}: {format_duration(simulation.step_s)} per step of "
        f"{format_count(strategy.batch, 'sample')}, "
        f"{format_number(samples_per_s)} samples/s{fits}",
        *(f"  {line}" for line in explain(simulation)),
        "",
        *memory_lines(simulation.memory_bytes),
        sep="\n",
    )

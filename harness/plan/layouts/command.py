"""`python -m harness.plan predict`: the step of a layout or a strategy, without a search."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec

from harness.domain.checkpoints import MOST_OF_STAGE, with_recomputation
from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.schedule import SCHEDULE_NAMES, ScheduleName
from harness.domain.shard_state import SHARD_STATES
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.errors import ConfigError, naming
from harness.measure.store import write_atomically
from harness.plan.cli import check_output, planned_for, request_from
from harness.plan.flags import SHARD_STATE, add_cluster, add_model, add_optimizer, flag_of
from harness.plan.layouts.degrees import (
    ParallelLayout,
    check_devices,
    microbatches_of,
    parse_layout,
    profiled_layout,
)
from harness.plan.notes import notes_of, print_notes
from harness.plan.portfolio import lack_of_memory, options_of
from harness.plan.report import memory_lines
from harness.plan.simulate.options import AllReduce
from harness.plan.simulate.report import explain
from harness.plan.simulate.simulator import Simulation, Simulator
from harness.units import format_count, format_duration, format_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = (
        "Predict a step of tensor x data x pipeline parallel, and write its strategy; or predict a "
        "strategy's file. If it does not fit into memory, the first line says so, or `fits` of "
        "--json; the exit code stays 0."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--layout",
        metavar="tp=T,dp=D,pp=P",
        help="degrees, 1 if not named. cuts=6-12 begins stages at these operators, shares=2-1 "
        "gives replicas samples in proportion, and devices=0-1-4-5 lists the devices: for the "
        "parts of a layer first, then for replicas, then for stages",
    )
    what.add_argument(
        "--strategy",
        dest="start",
        type=Path,
        metavar="FILE",
        help="predict this strategy file, as search writes and train takes it, at its own batch",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="default: one, two or four per device, whichever is fastest; 1 in a single stage",
    )
    names = [name for name in SCHEDULE_NAMES if name != "interleaved"]  # a device has one stage
    parser.add_argument("--schedule", choices=names, help="default: 1f1b")
    parser.add_argument(
        "--recompute",
        choices=["none", "stages", "segments", "layers"],
        help="run forward again before backward: whole stages, the segments of a stage that need "
        "the least memory, or layers one by one, which the executor cannot do (default: none)",
    )
    parser.add_argument("--shard-state", choices=SHARD_STATES, help=f"{SHARD_STATE}; default: none")
    parser.add_argument(
        "--no-overlap", action="store_true", help="gradients are synchronised after backward"
    )
    parser.add_argument(
        "--all-reduce", choices=get_args(AllReduce), default="ring", help="default: ring"
    )
    add_optimizer(parser.add_argument_group("optimizer"))
    add_model(parser)
    add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the strategy here")
    parser.set_defaults(cost="simulator", search_budget=None, search_seconds=None, seed=0)


def run(args: argparse.Namespace) -> None:
    """Predict the step of one layout or strategy, without a search.

    Raises:
        HarnessError: a file is missing or malformed, or the layout or strategy suits neither model
            nor cluster.
    """
    check_output(args.output)
    _check(args)
    layout = None if args.layout is None else parse_layout(args.layout)

    def check(cluster: Cluster) -> None:
        if layout is not None:
            check_devices(layout, cluster)

    request = request_from(args, check=check)
    graph, profile = request.model()
    batch = request.batch if request.start is None else request.start.batch
    if batch is None:
        raise ConfigError("the graph does not say its batch: give --batch-size B, samples per step")
    if graph.batch is None:  # its numbers are for a whole minibatch, as search takes them
        graph = msgspec.structs.replace(graph, batch=batch)
    options = replace(
        options_of(profile, request.cluster, request.reduce_dtype, request.optimizer),
        overlap=not args.no_overlap,
        all_reduce=args.all_reduce,
        recomputes_ahead=args.recompute != "layers",
    )
    simulator = Simulator(
        graph, profile, request.cluster, options=options, memory_bytes=request.memory_bytes
    )
    if request.start is None:
        assert layout is not None, "argparse asks for one of both"
        strategy = _strategy_of_layout(args, layout, simulator, batch)
    else:
        strategy = request.start
        _check_strategy(args, strategy, simulator)
    made_for = fingerprint(graph, request.cluster, profile)
    strategy = planned_for(args, msgspec.structs.replace(strategy, made_for=made_for))
    simulation = simulator.simulate(strategy)
    print_notes(notes_of(graph, profile, request.cluster, strategy, is_searched=False))
    if args.output is not None:
        write_atomically(args.output, strategy.to_json())
    (_print_json if args.json else _print_text)(simulation)


def _print_json(simulation: Simulation) -> None:
    strategy, optimizer = simulation.strategy, simulation.simulator.options.optimizer
    found = {
        "layout": strategy.name,
        "step_s": simulation.step_s,
        "samples_per_s": strategy.batch / simulation.step_s,
        "fits": simulation.fits,
        "memory_bytes": simulation.memory_bytes,
        "optimizer": optimizer,
        "strategy": strategy,
    }
    print(msgspec.json.encode(found).decode())


def _print_text(simulation: Simulation) -> None:
    strategy, optimizer = simulation.strategy, simulation.simulator.options.optimizer
    if not simulation.fits:
        print(f"does not fit: {lack_of_memory(simulation)}")
    print(
        f"{strategy.name}: {format_duration(simulation.step_s)} per step of "
        f"{format_count(strategy.batch, 'sample')} in "
        f"{format_count(strategy.n_microbatches, 'microbatch')}, "
        f"{format_number(strategy.batch / simulation.step_s)} samples/s",
        *(f"  {line}" for line in explain(simulation)),
        "",
        *memory_lines(simulation.memory_bytes, optimizer),
        sep="\n",
    )


def _check(args: argparse.Namespace) -> None:
    if args.microbatches is not None and args.microbatches < 1:
        raise ConfigError(f"--microbatches {args.microbatches} must be above 0")
    if args.start is None:
        return
    for name in ("microbatches", "schedule", "recompute", "shard_state"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"{flag_of(name)} goes with --layout: a strategy's file says its own, so edit "
                f"{args.start}"
            )


def _check_strategy(args: argparse.Namespace, strategy: Strategy, simulator: Simulator) -> None:
    if args.batch_size not in (None, strategy.batch):
        raise ConfigError(
            f"--batch-size {args.batch_size}: {args.start} has a batch of {strategy.batch}: leave "
            "the flag out, or search with it"
        )
    with naming(args.start):
        check_fresh(strategy, simulator.graph, simulator.cluster)
        validate(strategy, simulator.graph, simulator.cluster)


def _strategy_of_layout(
    args: argparse.Namespace, layout: ParallelLayout, simulator: Simulator, batch: int
) -> Strategy:
    given = [args.microbatches] if args.microbatches else microbatches_of(layout, simulator, batch)
    schedule: ScheduleName = args.schedule or "1f1b"
    found = [
        profiled_layout(layout, simulator, batch, n_microbatches=n, schedule=schedule)
        for n in given
    ]
    if args.recompute not in (None, "none"):
        n_segments = MOST_OF_STAGE if args.recompute == "segments" else 1
        found = [with_recomputation(one, simulator.graph, n_segments) for one in found]
    state = args.shard_state or "none"
    return simulator.fastest([msgspec.structs.replace(one, shard_state=state) for one in found])

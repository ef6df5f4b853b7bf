"""`python -m harness.plan predict --layout ...`: the step of one strategy, without a search."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import msgspec

from harness.domain.fingerprint import fingerprint
from harness.domain.strategy import Strategy
from harness.errors import ConfigError
from harness.measure.store import write_atomically
from harness.measure.text import table
from harness.plan import cli
from harness.plan.layouts.degrees import ParallelLayout, parse_layout, profiled_layout
from harness.plan.portfolio import options_of
from harness.plan.simulate.report import explain
from harness.plan.simulate.simulator import Simulation, Simulator
from harness.units import format_bytes, format_duration

_MOST_DEVICES = 16


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The printed prediction."""

    layout: str
    step_s: float
    samples_per_s: float
    fits: bool
    memory_bytes: dict[str, int]
    strategy: Strategy


def predict(args: argparse.Namespace, capture_model: cli.CaptureModel) -> None:
    """Print the prediction, and write the strategy.

    Raises:
        HarnessError: bad input, or the layout does not fit the model or the cluster.
    """
    layout = parse_layout(args.layout)
    request = cli.request_from(args, capture_model=capture_model, progress=lambda progress: None)
    graph, profile = request.model()
    if request.batch is None:
        raise ConfigError("the graph does not say its batch: give --batch-size B, samples per step")
    if line := cli.source_line(args, request):
        print(line, file=sys.stderr)
    options = replace(
        options_of(profile),
        overlap=not args.no_overlap,
        all_reduce=args.all_reduce,
        recomputes_ahead=args.recompute != "layers",
    )
    simulator = Simulator(
        graph, profile, request.cluster, options=options, memory_bytes=request.memory_bytes
    )
    strategy = profiled_layout(
        layout,
        simulator,
        request.batch,
        n_microbatches=args.microbatches,
        schedule=args.schedule,
        recompute=args.recompute != "none",
    )
    strategy = msgspec.structs.replace(
        strategy,
        shard_state=args.shard_state,
        made_for=fingerprint(graph, request.cluster, profile),
    )
    simulation = simulator.simulate(strategy)
    if args.output is not None:
        write_atomically(args.output, strategy.to_json())
    found = _predicted(layout, simulation)
    lines = [msgspec.json.encode(found).decode()] if args.json else _lines(found, simulation)
    print("\n".join(lines))


def _predicted(layout: ParallelLayout, simulation: Simulation) -> Predicted:
    return Predicted(
        layout=layout.name,
        step_s=simulation.step_s,
        samples_per_s=simulation.strategy.batch / simulation.step_s,
        fits=simulation.fits,
        memory_bytes=simulation.memory_bytes,
        strategy=simulation.strategy,
    )


def _lines(found: Predicted, simulation: Simulation) -> list[str]:
    fits = "" if found.fits else "; it does not fit into memory"
    rows = [[name, format_bytes(n_bytes)] for name, n_bytes in found.memory_bytes.items()]
    return [
        f"{found.layout}: {format_duration(found.step_s)} per step, "
        f"{found.samples_per_s:.4g} samples/s{fits}",
        *(f"  {line}" for line in explain(simulation)),
        "",
        *table(["device", "peak memory"], rows[:_MOST_DEVICES]),
    ]

"""The commands of `python -m harness.plan`: search, predict, advise, import and others."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph
from harness.domain.strategy import Strategy
from harness.errors import EXIT_CODE, ConfigError, EnvironmentSetupError, HarnessError
from harness.measure.store import write_atomically
from harness.plan import cli, flags
from harness.plan.advise.command import advise
from harness.plan.costs import ignore_progress, run
from harness.plan.importing import command as importing
from harness.plan.layouts.degrees import parse_layout, profiled_layout
from harness.plan.portfolio import options_of
from harness.plan.report import ProgressLine, json_line, memory_lines, result_lines
from harness.plan.show import show_file
from harness.plan.simulate.report import explain
from harness.plan.simulate.simulator import Simulator
from harness.plan.validation import command as validate
from harness.units import format_duration

_INTERRUPTED = 130  # as a shell reports SIGINT


def _capture_model(name: str, batch: int) -> Graph:
    """Capture by torch, which only this needs."""
    try:
        capture = importlib.import_module("harness.runtime.capture.capture")
    except ImportError as error:
        raise EnvironmentSetupError(
            f"--model {name} needs torch to capture the model ({error}): install it, or plan from "
            "files with --profile and --graph"
        ) from None
    graph: Graph = capture.capture_model(name, batch)
    return graph


def _check_output(path: Path) -> None:
    """Refuse a place where no file can be, before a search that may take long.

    Raises:
        ConfigError: its directory is missing, or it is one.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}: make it first")
    if path.is_dir():
        raise ConfigError(f"--output {path} is a directory: name a file")


def _search(args: argparse.Namespace) -> None:
    progress = ProgressLine()
    try:
        request = cli.request_from(args, capture_model=_capture_model, progress=progress)
        if line := cli.source_line(args, request):
            print(line, file=sys.stderr)
        result = run(args.cost, request)
    finally:
        progress.clear()
    if args.output is not None:
        write_atomically(args.output, result.strategy.to_json())
    print(json_line(result) if args.json else "\n".join(result_lines(result)))


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The printed prediction."""

    layout: str
    step_s: float
    samples_per_s: float
    fits: bool
    memory_bytes: dict[str, int]
    strategy: Strategy


def _predict(args: argparse.Namespace) -> None:
    """Predict the step of one layout, without a search."""
    layout = parse_layout(args.layout)
    request = cli.request_from(args, capture_model=_capture_model, progress=ignore_progress)
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
    made_for = fingerprint(graph, request.cluster, profile)
    strategy = msgspec.structs.replace(strategy, shard_state=args.shard_state, made_for=made_for)
    simulation = simulator.simulate(strategy)
    if args.output is not None:
        write_atomically(args.output, strategy.to_json())
    found = Predicted(
        layout=layout.name,
        step_s=simulation.step_s,
        samples_per_s=strategy.batch / simulation.step_s,
        fits=simulation.fits,
        memory_bytes=simulation.memory_bytes,
        strategy=strategy,
    )
    if args.json:
        print(msgspec.json.encode(found).decode())
        return
    fits = "" if found.fits else "; it does not fit into memory"
    print(
        f"{found.layout}: {format_duration(found.step_s)} per step, "
        f"{found.samples_per_s:.4g} samples/s{fits}",
        *(f"  {line}" for line in explain(simulation)),
        "",
        *memory_lines(found.memory_bytes),
        sep="\n",
    )


def _convert(args: argparse.Namespace) -> None:
    data, what = cli.converted(args)
    write_atomically(args.output, data)
    print(f"{what}; wrote {args.output} ({args.to})")


def _show(args: argparse.Namespace) -> None:
    print("\n".join(show_file(args.file, dot=args.dot, graph_path=args.graph)))


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "search": _search,
    "predict": _predict,
    "advise": lambda args: advise(args, _capture_model),
    "show": _show,
    "convert": _convert,
    "import": lambda args: importing.run(args, cli.cluster_from),
    "validate": validate.run,
}
# Their --output is a file, not a directory.
_WRITE_A_FILE = ("search", "predict", "advise", "convert")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input, 130 when interrupted before any plan."""
    try:
        args = flags.parse(argv)
        if args.command in _WRITE_A_FILE and args.output is not None:
            _check_output(args.output)
        _COMMANDS[args.command](args)
    except HarnessError as error:
        print(f"harness.plan: {error}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print("harness.plan: interrupted before a plan was found", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # `... | head` has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0

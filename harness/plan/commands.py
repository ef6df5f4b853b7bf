"""The commands of `python -m harness.plan`: search, predict, advise, import and others."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.domain.graph import Graph
from harness.errors import EXIT_CODE, ConfigError, EnvironmentSetupError, HarnessError
from harness.measure.store import write_atomically
from harness.plan import cli, flags
from harness.plan.costs import run
from harness.plan.importing import command as importing
from harness.plan.report import ProgressLine, json_line, result_lines
from harness.plan.show import show_file
from harness.plan.validation import command as validate

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
    if args.output is not None:
        _check_output(args.output)
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


def _advise(args: argparse.Namespace) -> None:
    """Its simulator takes time to import, so that the other commands do without it."""
    if args.output is not None:
        _check_output(args.output)
    command = importlib.import_module("harness.plan.advise.command")
    command.advise(args, _capture_model)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input, 130 when interrupted before any plan."""
    try:
        args = flags.parse(argv)
        if args.command == "search":
            _search(args)
        elif args.command == "advise":
            _advise(args)
        elif args.command == "predict":
            if args.output is not None:
                _check_output(args.output)
            importlib.import_module("harness.plan.predict").predict(args, _capture_model)
        elif args.command == "import":
            importing.run(args, cli.cluster_from)
        elif args.command == "convert":
            _check_output(args.output)
            data, what = cli.converted(args)
            write_atomically(args.output, data)
            print(f"{what}; wrote {args.output} ({args.to})")
        elif args.command == "validate":
            validate.run(args)
        else:
            print("\n".join(show_file(args.file, dot=args.dot, graph_path=args.graph)))
    except HarnessError as error:
        print(f"harness.plan: {error}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print("harness.plan: interrupted before a plan was found", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # `... | head` has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0

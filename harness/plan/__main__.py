"""`python -m harness.plan COMMAND`: plan without running a step; COMMANDS has one line for each.

Each command is one module, imported when the command is given.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from harness.errors import run_command
from harness.inputs import CommandParser, refuse_old_spelling

# Module and help of each; the module has `add_arguments(parser)` and `run(args)`.
COMMANDS = {
    "search": ("search.command", "search for the fastest strategy"),
    "predict": ("layouts.command", "predict the step of a layout or a strategy, without a search"),
    "advise": ("advise.command", "say which machines to use"),
    "show": ("show", "print a graph, profile, cluster or strategy"),
    "convert": (
        "formats.command",
        "write a strategy in another format, or as settings of torchtitan, Megatron-LM, DeepSpeed",
    ),
    "import": (
        "importing.command",
        "make profile and cluster files from measurements of other tools",
    ),
    "validate": ("validation.command", "compare predictions with steps that others measured"),
}
_RENAMED = {
    "--batch": "--batch-size",
    "--budget": "--search-budget",
    "--seconds": "--search-seconds",
}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    refuse_old_spelling(words, _RENAMED)
    parser = CommandParser(
        prog="python -m harness.plan",
        description="Find how to spread a model over a cluster, and predict its step.",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar=f"{{{','.join(COMMANDS)}}}"
    )
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in words[:1]:
            loaded = import_module(f"harness.plan.{module}")
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser.parse_args(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input, 130 when interrupted before any plan."""
    # Planning multiplies no matrices, and the threads of numpy's BLAS spin while they wait: they
    # took as much time as planning a graph of 400 operators. Set before a command imports numpy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    def run() -> int:
        args = _parse(sys.argv[1:] if argv is None else argv)
        args.run(args)
        return 0

    return run_command("harness.plan", run, "interrupted before a plan was found")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m harness.plan convert`: a strategy from one file format to another."""

import argparse
from pathlib import Path
from typing import get_args

from harness.errors import ConfigError, naming
from harness.inputs import MOST_COUNT, shorten
from harness.measure.store import write_atomically
from harness.plan.cli import check_output
from harness.plan.formats.detect import FORMATS, convert, read_strategy_file
from harness.plan.formats.flexflow import DimOrder
from harness.plan.show import load_graph

_DIMS = get_args(DimOrder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Write a strategy in another format. The content tells the file's format."
    parser.add_argument("file", type=Path, help="strategy in any of these formats")
    parser.add_argument("--to", choices=FORMATS, default="harness", help="default: harness")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="graph of the strategy")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="global batch, for a file of another project (default: the graph's)",
    )
    parser.add_argument(
        "--dims",
        choices=_DIMS,
        default=_DIMS[0],
        help="order of dims in the FlexFlow file (default: innermost_first, the order that is also "
        "written; FlexFlow's simulator of 2018 prints samples first)",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="write the strategy here"
    )


def run(args: argparse.Namespace) -> None:
    """Write the converted file, and print a description of the input.

    Raises:
        HarnessError: a file is missing or malformed, or the format cannot hold the strategy.
    """
    check_output(args.output)
    if args.batch_size is not None and not 0 < args.batch_size <= MOST_COUNT:
        raise ConfigError(f"--batch-size {shorten(args.batch_size)} must be above 0")
    imported = read_strategy_file(args.file)
    has_dims = isinstance(imported.content, list)  # FlexFlow's
    if args.dims != _DIMS[0] and not has_dims:
        raise ConfigError(
            f"--dims is of FlexFlow's files, {args.file} is {imported.format}: drop it"
        )
    graph = None if args.graph is None else load_graph(args.graph)
    with naming(args.file):
        data = convert(imported, args.to, graph=graph, batch=args.batch_size, order=args.dims)
    write_atomically(args.output, data)
    order = f", dims {args.dims.replace('_', ' ')}" if has_dims else ""
    print(
        f"read {args.file} as {imported.format}{order}: {imported.describe(args.dims)}; "
        f"wrote {args.output} ({args.to})"
    )

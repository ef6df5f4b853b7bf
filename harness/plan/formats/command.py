"""`python -m harness.plan convert`: a strategy in another format, or as a trainer's settings."""

import argparse
from pathlib import Path
from typing import get_args

from harness.domain.reduce_dtype import ReduceDtype
from harness.errors import ConfigError, naming
from harness.inputs import MOST_COUNT, shorten
from harness.measure.store import write_atomically
from harness.plan.cli import check_output
from harness.plan.flags import flag_of
from harness.plan.formats.detect import FORMATS, convert, read_strategy_file, strategy_from
from harness.plan.formats.flexflow import DimOrder
from harness.plan.formats.trainers import DTYPES, TRAINERS, settings_of
from harness.plan.notes import print_notes
from harness.plan.show import load_graph

_DIMS = get_args(DimOrder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = (
        "Write a strategy in the format of another planner, or as settings of the trainer that you "
        "use: arguments of torchtitan or of Megatron-LM's pretrain_gpt.py (give them by "
        "$(cat FILE)), or DeepSpeed's ds_config.json. Lines on stderr say what was assumed. The "
        "content tells the format of the input."
    )
    parser.add_argument("file", type=Path, help="strategy, as search writes it or of a planner")
    parser.add_argument(
        "--to", choices=[*FORMATS, *TRAINERS], default="harness", help="default: harness"
    )
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
    trainer = parser.add_argument_group("settings of a trainer")
    trainer.add_argument("--dtype", choices=DTYPES, help="of training (default: fp32)")
    trainer.add_argument(
        "--reduce-dtype",
        choices=get_args(ReduceDtype),
        help="dtype in which gradients are summed (default: fp32)",
    )
    trainer.add_argument(
        "--devices-per-node",
        type=int,
        metavar="N",
        help="of a strategy with state that is sharded in nodes",
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
    own = ("dtype", "reduce_dtype", "devices_per_node")  # of trainers
    given = {name: value for name in own if (value := getattr(args, name)) is not None}
    if given and args.to not in TRAINERS:
        raise ConfigError(f"{flag_of(next(iter(given)))} is for {', '.join(TRAINERS)}: drop it")
    graph = None if args.graph is None else load_graph(args.graph)
    wrote = args.to
    with naming(args.file):
        if args.to in TRAINERS:
            strategy = strategy_from(imported, graph, args.batch_size, args.dims)
            data, plan = settings_of(strategy, args.to, **given)
            wrote += f", {plan.degrees}"
            print_notes(f"assumed: {note}" for note in plan.notes)
        else:
            data = convert(imported, args.to, graph=graph, batch=args.batch_size, order=args.dims)
    write_atomically(args.output, data)
    order = f", dims {args.dims.replace('_', ' ')}" if has_dims else ""
    print(
        f"read {args.file} as {imported.format}{order}: {imported.describe(args.dims)}; "
        f"wrote {args.output} ({wrote})"
    )

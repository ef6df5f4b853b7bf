"""The flags of `python -m harness.plan`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from harness.domain.profile import DTYPE_NAMES
from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.strategy import SHARD_STATES
from harness.inputs import refuse_old_spelling
from harness.plan.costs import COSTS, FAMILIES
from harness.plan.formats.detect import FORMATS
from harness.plan.importing import command as importing
from harness.plan.simulate.options import OPTIMIZERS, AllReduce
from harness.plan.validation import command as validate

_SEARCH_EXAMPLES = """\
examples:
  python -m harness.plan search --profile vgg16.txt --topology 4x4 --bandwidth 1e10,1.25e9 \\
      --cost pipedream --json
  python -m harness.plan search --profile vgg16.json --graph vgg16.graph.json \\
      --cluster cluster.json --batch-size 256 --search-seconds 30 --output plan.json
  python -m harness.plan search --cost flexflow2018 --topology 2x4 --search-budget 250000 --seed 1
  python -m harness.plan search --dlrm-tables 8x1000000x64 --batch-size 1024 --topology 1x4 \\
      --bandwidth 12e9 --memory 12GB --rates 9.3e12,549e9

costs:
{costs}

A cluster file is written by `./entry.sh links`, or by hand. Interrupt (Ctrl-C) a search to take
the best plan found so far.
"""

_ADVISE_EXAMPLES = """\
examples:
  python -m harness.plan advise results/ --model vgg16 --batch-size 160
  python -m harness.plan advise --profile vgg16.json --cluster cluster.json --per-device-batch 32 \\
      --strategies ddp pipeline --prices hosts/tesla.toml
"""

_SHARD_STATE = (
    "state of which each of the n devices that hold a weight keeps 1/n: optimizer (ZeRO-1), "
    "gradients too (ZeRO-2, SHARD_GRAD_OP), parameters too (ZeRO-3, FULL_SHARD)"
)

RENAMED = {
    "--batch": "--batch-size",
    "--budget": "--search-budget",
    "--seconds": "--search-seconds",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.plan",
        description="Find how to spread a model over a cluster, and predict its step.",
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="{search,predict,advise,show,convert,import,validate}",
    )
    _add_search(commands)
    _add_predict(commands)
    _add_advise(commands)
    _add_show(commands)
    _add_convert(commands)
    _add_cluster(importing.add_parser(commands))
    validate.add_parser(commands)
    return parser


def _add_search(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    costs = "\n".join(f"  {name:<14}{cost.summary}" for name, cost in COSTS.items())
    search = commands.add_parser(
        "search",
        help="search for the fastest strategy",
        description="Search for the fastest strategy, and say why it was chosen.",
        epilog=_SEARCH_EXAMPLES.format(costs=costs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(search)
    _add_cluster(search)
    how = search.add_argument_group("search")
    how.add_argument("--cost", choices=list(COSTS), default="simulator", help="default: simulator")
    how.add_argument(
        "--search-budget",
        type=int,
        metavar="N",
        help="proposals of its searches (default: the cost's)",
    )
    how.add_argument("--search-seconds", type=float, metavar="S", help="most wall seconds")
    how.add_argument(
        "--shard-state",
        choices=SHARD_STATES,
        help=f"{_SHARD_STATE}; default: what memory needs",
    )
    how.add_argument(
        "--start",
        type=Path,
        metavar="FILE",
        help="a strategy to start from too, of any format that `convert` reads",
    )
    how.add_argument("--seed", type=int, default=0, metavar="K", help="default: 0")
    out = search.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--output", type=Path, metavar="FILE", help="write the strategy here")


def _add_predict(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    predict = commands.add_parser(
        "predict",
        help="predict the step of a layout, without a search",
        description="Predict a step of tensor x data x pipeline parallel; write its strategy.",
    )
    predict.add_argument(
        "--layout",
        required=True,
        metavar="tp=T,dp=D,pp=P",
        help="degrees, 1 if not named; cuts=6-12 begins stages at these operators, shares=2-1 "
        "gives replicas samples in proportion, devices=0-1-4-5 names devices, parts of a layer "
        "first, then replicas, then stages",
    )
    predict.add_argument("--microbatches", type=int, default=1, metavar="M", help="default: 1")
    predict.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b", help="default: 1f1b")
    predict.add_argument(
        "--recompute",
        choices=["none", "stages", "layers"],
        default="none",
        help="forward again before backward: a stage at once, as the executor does, or layer by "
        "layer (default: none)",
    )
    predict.add_argument(
        "--shard-state", choices=SHARD_STATES, default="none", help=f"{_SHARD_STATE}; default: none"
    )
    predict.add_argument(
        "--no-overlap", action="store_true", help="gradients are synchronised after backward"
    )
    predict.add_argument(
        "--all-reduce", choices=get_args(AllReduce), default="ring", help="default: ring"
    )
    _add_model(predict)
    _add_cluster(predict)
    predict.add_argument("--json", action="store_true", help="print one JSON object")
    predict.add_argument("--output", type=Path, metavar="FILE", help="write the strategy here")
    predict.set_defaults(
        cost="simulator", search_budget=None, search_seconds=None, start=None, seed=0
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        help="capture this model, or package.module:factory; times come from --profile, else from "
        "results/profile-MODEL.json, else are estimated",
    )
    model.add_argument(
        "--profile", type=Path, metavar="FILE", help="times: harness JSON or PipeDream graph.txt"
    )
    model.add_argument(
        "--graph",
        type=Path,
        metavar="FILE",
        help="graph of a harness profile (default: the .graph.json beside it)",
    )
    model.add_argument(
        "--rates",
        metavar="FLOPS,BYTES",
        help="plan for devices that nobody has profiled: their FLOP/s and memory bytes/s, such as "
        "9.3e12,549e9 (a roofline in place of --profile)",
    )
    model.add_argument(
        "--dlrm-tables",
        metavar="NxROWSxCOLUMNS",
        help="plan a DLRM of these tables, such as 8x1000000x64, without capturing a model",
    )
    model.add_argument(
        "--dlrm-bottom-mlp",
        default="64-512-512-64",
        metavar="WIDTHS",
        help="of --dlrm-tables, from the dense features to the tables' columns (default: "
        "%(default)s)",
    )
    model.add_argument(
        "--dlrm-top-mlp",
        default="576-1024-1024-1024-1",
        metavar="WIDTHS",
        help="of --dlrm-tables, from all columns and the bottom MLP's output (default: "
        "%(default)s)",
    )
    model.add_argument(
        "--dtype",
        choices=list(DTYPE_NAMES),
        help="dtype of training, whose times are taken from the profile (default: the profile's)",
    )
    model.add_argument("--batch-size", type=int, metavar="B", help="global batch, samples")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("cluster")
    where.add_argument("--cluster", type=Path, metavar="FILE", help="nodes, devices and links")
    where.add_argument("--topology", metavar="NODESxDEVICES", help="equal devices, such as 4x4")
    where.add_argument(
        "--bandwidth",
        metavar="INSIDE[,BETWEEN]",
        help="of --topology, inside and between nodes: bytes/s (1e10,1.25e9) or bits (10gbit)",
    )
    where.add_argument(
        "--memory", metavar="BYTES", help="limit per device, such as 12GB (default: the cluster's)"
    )
    where.add_argument(
        "--device-kind",
        metavar="KIND",
        help="device of a graph.txt's profile (default: the cluster's first kind)",
    )


def _add_advise(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    advise = commands.add_parser(
        "advise",
        help="say which machines to use",
        description="Say which machines to use for a model, with which strategy, what each other "
        "machine would cost or bring, and which batch fits.",
        epilog=_ADVISE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    advise.add_argument(
        "results",
        nargs="?",
        type=Path,
        metavar="RESULTS",
        help="directory of results: its cluster.json and profile, and how far its predictions "
        "were off",
    )
    _add_model(advise)
    advise.add_argument(
        "--per-device-batch",
        type=int,
        metavar="B",
        help="samples on each device, in place of a global batch that all sets share",
    )
    _add_cluster(advise)
    how = advise.add_argument_group("advice")
    how.add_argument(
        "--strategies",
        nargs="+",
        default=list(FAMILIES),
        metavar="S",
        help=f"strategies that may be used (default: {' '.join(FAMILIES)})",
    )
    how.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default="momentum",
        help="its state needs memory and its step needs time (default: %(default)s)",
    )
    how.add_argument(
        "--no-overlap",
        action="store_true",
        help="gradients are synchronised after the backward pass, as by DeepSpeed with "
        "overlap_comm off",
    )
    how.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help="watts and prices of the nodes (default: the file in hosts/ that has these nodes)",
    )
    how.add_argument(
        "--search-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="processor seconds of pricing and searching (default: %(default)s)",
    )
    out = advise.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument(
        "--output", type=Path, metavar="FILE", help="write the best set's strategy here"
    )
    advise.set_defaults(cost="simulator", search_budget=None, start=None, shard_state=None, seed=0)


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="print a graph, profile, cluster or strategy",
        description="Print a graph, profile, cluster or strategy, of our formats or PipeDream's or "
        "FlexFlow's; the content says which kind it is.",
    )
    show.add_argument("file", type=Path)
    show.add_argument("--dot", action="store_true", help="a graph as Graphviz source")
    show.add_argument(
        "--graph", type=Path, metavar="FILE", help="with --dot, of a strategy: its graph"
    )


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a strategy in another format",
        description="Write a strategy in another format; the file's content says which it has.",
    )
    convert.add_argument("file", type=Path)
    convert.add_argument("--to", choices=FORMATS, default="harness", help="default: harness")
    convert.add_argument("--graph", type=Path, metavar="FILE", help="graph of the strategy")
    convert.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="of another project's file (default: the graph's)",
    )
    convert.add_argument(
        "--dims",
        choices=["innermost_first", "samples_first"],
        default="innermost_first",
        help="order of a FlexFlow file's dims (default: innermost_first; the simulator of 2018 "
        "prints samples first)",
    )
    convert.add_argument("--output", type=Path, required=True, metavar="FILE")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exits with 2 and a usage line when it is wrong."""
    words = sys.argv[1:] if argv is None else argv
    refuse_old_spelling(words, RENAMED)
    return build_parser().parse_args(words)

"""`python -m harness.plan search`: flags, files in, a plan out."""

import argparse
from pathlib import Path

import msgspec

from harness.domain.shard_state import SHARD_STATES
from harness.measure.store import write_atomically
from harness.plan.cli import check_output, planned_for, request_from
from harness.plan.costs import COSTS
from harness.plan.costs import run as search
from harness.plan.flags import SHARD_STATE, add_cluster, add_model, add_optimizer
from harness.plan.notes import notes_of, print_notes
from harness.plan.report import ProgressLine, result_lines

_EXAMPLES = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    costs = "\n".join(f"  {name:<14}{cost.summary}" for name, cost in COSTS.items())
    parser.description = "Search for the fastest strategy, and say why it was chosen."
    parser.epilog = _EXAMPLES.format(costs=costs)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model(parser)
    add_cluster(parser)
    how = parser.add_argument_group("search")
    how.add_argument("--cost", choices=list(COSTS), default="simulator", help="default: simulator")
    how.add_argument(
        "--search-budget",
        type=int,
        metavar="N",
        help="most plans that the search proposes (default of simulator: 400 to 12000, fewer for a "
        "larger model and cluster; of maxload: 12000; of flexflow2018: 250000, or none with "
        "--search-seconds)",
    )
    how.add_argument(
        "--search-seconds",
        type=float,
        metavar="S",
        help="most wall seconds (default: no limit, so the budget alone ends a search)",
    )
    add_optimizer(how)
    how.add_argument(
        "--shard-state",
        choices=SHARD_STATES,
        help=f"{SHARD_STATE}; default: as much as memory requires, and the optimizer's state if "
        "this is predicted to make a step 2 %% faster",
    )
    how.add_argument(
        "--start",
        type=Path,
        metavar="FILE",
        help="a strategy from which the search also starts, in any format that `convert` reads",
    )
    how.add_argument("--seed", type=int, default=0, metavar="K", help="default: 0")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--output", type=Path, metavar="FILE", help="write the strategy here")


def run(args: argparse.Namespace) -> None:
    """Print the best plan that a search finds; a KeyboardInterrupt ends the search.

    Raises:
        HarnessError: a file is missing or malformed, flags contradict each other, or no plan
            exists.
    """
    check_output(args.output)
    progress = ProgressLine()
    try:
        request = request_from(args, progress)
        result = search(args.cost, request)
        result = msgspec.structs.replace(result, strategy=planned_for(args, result.strategy))
    finally:
        progress.clear()
    if request.profile is not None and "optimizer" not in COSTS[args.cost].unread:
        graph, profile = request.model()
        told = notes_of(graph, profile, request.cluster, result.strategy, is_searched=True)
        print_notes(told)
    if args.output is not None:
        write_atomically(args.output, result.strategy.to_json())
    print(msgspec.json.encode(result).decode() if args.json else "\n".join(result_lines(result)))

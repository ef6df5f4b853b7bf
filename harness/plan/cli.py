"""The command line of `python -m harness.plan`: flags, and the request that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.errors import ConfigError, GraphError
from harness.plan.convert import FORMATS, convert
from harness.plan.costs import COSTS
from harness.plan.dlrm_graph import dlrm_graph, parse_dlrm
from harness.plan.estimate import estimate_profile
from harness.plan.find import default_profile, graph_beside, knows
from harness.plan.formats.detect import read_strategy_file
from harness.plan.pipedream.graph_txt import parse_graph_txt
from harness.plan.request import PlanRequest, Progress
from harness.plan.roofline import DeviceRates, roofline_profile
from harness.plan.show import load_graph
from harness.units import parse_bandwidth, parse_bytes

CaptureModel = Callable[[str, int], Graph]

_NO_LIMIT_BYTES = 2**50
_DEFAULT_KIND = "device"
_ESTIMATES = ("estimated from FLOPs", "roofline")
DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16"}  # as profiles name them

_SEARCH_EXAMPLES = """\
examples:
  python -m harness.plan search --profile vgg16.txt --topology 4x4 --bandwidth 1e10,1.25e9 \\
      --cost pipedream --json
  python -m harness.plan search --profile vgg16.json --graph vgg16.graph.json \\
      --cluster cluster.json --batch 256 --seconds 30 --output plan.json
  python -m harness.plan search --cost flexflow2018 --topology 2x4 --budget 250000 --seed 1
  python -m harness.plan search --dlrm-tables 8x1000000x64 --batch 1024 --topology 1x4 \\
      --bandwidth 12e9 --memory 12GB --rates 9.3e12,549e9

costs:
{costs}

A cluster file is written by `./entry.sh links`, or by hand. Interrupt (Ctrl-C) a search to take
the best plan found so far.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of both commands."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.plan",
        description="Find how to spread a model over a cluster, and what it will cost.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{search,show,convert}")
    _add_search(commands)
    _add_show(commands)
    _add_convert(commands)
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
    model = search.add_argument_group("model")
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
        "9.3e12,549e9 (a roofline instead of --profile)",
    )
    model.add_argument(
        "--dlrm-tables",
        metavar="NxROWSxCOLUMNS",
        help="plan a DLRM of these tables, such as 8x1000000x64, without capturing a model",
    )
    model.add_argument("--dlrm-bottom-mlp", default="64-512-512-64", metavar="WIDTHS")
    model.add_argument("--dlrm-top-mlp", default="576-1024-1024-1024-1", metavar="WIDTHS")
    model.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="which of the profile's times: what training computes in (default: what it has)",
    )
    model.add_argument("--batch", type=int, metavar="B", help="global batch, samples")
    where = search.add_argument_group("cluster")
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
        help="what a graph.txt was profiled on (default: the cluster's first kind)",
    )
    how = search.add_argument_group("search")
    how.add_argument("--cost", choices=list(COSTS), default="simulator", help="default: simulator")
    how.add_argument("--budget", type=int, metavar="N", help="most proposals")
    how.add_argument("--seconds", type=float, metavar="S", help="most wall seconds")
    how.add_argument("--seed", type=int, default=0, metavar="K", help="default: 0")
    out = search.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--output", type=Path, metavar="FILE", help="write the strategy here")


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="print a graph, profile, cluster or strategy",
        description="Print a graph, profile, cluster or strategy, of our formats or PipeDream's or "
        "FlexFlow's; the kind is told by the content.",
    )
    show.add_argument("file", type=Path)
    show.add_argument("--dot", action="store_true", help="a graph as Graphviz source")
    show.add_argument("--graph", type=Path, metavar="FILE", help="draw a strategy over this graph")


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a strategy in another format",
        description="Write a strategy in another format; that of the file is told by its content.",
    )
    convert.add_argument("file", type=Path)
    convert.add_argument("--to", choices=FORMATS, default="harness", help="default: harness")
    convert.add_argument("--graph", type=Path, metavar="FILE", help="what the strategy is for")
    convert.add_argument("--batch", type=int, metavar="B", help="default: the graph's")
    convert.add_argument(
        "--dims",
        choices=["innermost_first", "samples_first"],
        default="innermost_first",
        help="order of a FlexFlow file's dims (default: innermost_first; the simulator of 2018 "
        "prints samples first)",
    )
    convert.add_argument("--output", type=Path, required=True, metavar="FILE")


def converted(args: argparse.Namespace) -> tuple[bytes, str]:
    """The converted file's bytes, and what was read, in words.

    Raises:
        HarnessError: a file is missing or malformed, or the format cannot hold the strategy.
    """
    imported = read_strategy_file(args.file)
    graph = None if args.graph is None else load_graph(args.graph)
    data = convert(imported, args.to, graph=graph, batch=args.batch, order=args.dims)
    order = f", dims {args.dims.replace('_', ' ')}" if imported.format.startswith("flex") else ""
    return data, f"read {args.file} as {imported.format}{order}: {imported.describe()}"


def request_from(
    args: argparse.Namespace,
    *,
    capture_model: CaptureModel,
    progress: Callable[[Progress], None],
) -> PlanRequest:
    """Read the files that the flags name.

    Raises:
        ConfigError: flags contradict each other.
        HarnessError: a file is missing or malformed.
    """
    _check_numbers(args)
    cluster = _cluster(args)
    graph, profile = None, None
    if COSTS[args.cost].needs_model:
        graph, profile = _model(args, cluster, capture_model)
        profile = profile if args.dtype is None else _of_dtype(profile, args.dtype)
    return PlanRequest(
        cluster=cluster,
        graph=graph,
        profile=profile,
        batch=args.batch or (graph.batch if graph is not None else None),
        memory_bytes=None if args.memory is None else parse_bytes(args.memory),
        budget=args.budget,
        seconds=args.seconds,
        seed=args.seed,
        progress=progress,
    )


def _check_numbers(args: argparse.Namespace) -> None:
    for flag in ("batch", "budget", "seconds"):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            raise ConfigError(f"--{flag} {value} must be above 0")
    if args.memory is not None and parse_bytes(args.memory) < 1:
        raise ConfigError(f"--memory {args.memory} must be above 0")


def parse_topology(text: str) -> tuple[int, int]:
    """Nodes and devices per node of `4x4`; a single number is one node.

    Raises:
        ConfigError: anything else.
    """
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--topology {text!r} is not NODESxDEVICES: write it like 4x4")
    return (1, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def _cluster(args: argparse.Namespace) -> Cluster:
    if (args.cluster is None) == (args.topology is None):
        raise ConfigError("give either --cluster FILE or --topology NODESxDEVICES")
    if args.cluster is not None:
        if args.bandwidth is not None:
            raise ConfigError("--bandwidth goes with --topology: a cluster file has its own links")
        return Cluster.load(args.cluster)
    n_nodes, n_devices = parse_topology(args.topology)
    inside, between = _bandwidths(args)
    memory = _NO_LIMIT_BYTES if args.memory is None else parse_bytes(args.memory)
    if args.memory is None and args.cost == "simulator":
        raise ConfigError("--topology needs --memory BYTES, what each device may use, such as 12GB")
    return Cluster.uniform(
        n_nodes,
        n_devices,
        inside_bytes_per_s=inside,
        between_bytes_per_s=between,
        memory_bytes=memory,
        kind=args.device_kind or _profiled_kind(args) or _DEFAULT_KIND,
    )


def _profiled_kind(args: argparse.Namespace) -> str | None:
    """The kind of device of the profile that is given or found; None when it does not say."""
    path = args.profile
    if path is None and args.model is not None:
        path = default_profile(args.model)
    if path is None or not path.is_file():
        return None
    data = path.read_bytes()
    if not data.lstrip().startswith(b"{"):
        return None
    kinds = Profile.from_json(data, source=str(path)).device_kinds
    return kinds[0] if kinds else None


def _bandwidths(args: argparse.Namespace) -> tuple[float, float | None]:
    if args.bandwidth is None:
        if COSTS[args.cost].needs_model:
            raise ConfigError("--topology needs --bandwidth INSIDE[,BETWEEN], such as 1e10,1.25e9")
        return 1.0, None  # this cost brings its own links
    values = [parse_bandwidth(part) for part in args.bandwidth.split(",")]
    if len(values) > 2 or not all(value > 0 for value in values):
        raise ConfigError(
            f"--bandwidth {args.bandwidth!r} is not INSIDE[,BETWEEN] above 0: write 1e10,1.25e9"
        )
    return values[0], values[1] if len(values) == 2 else None


def _model(
    args: argparse.Namespace, cluster: Cluster, capture_model: CaptureModel
) -> tuple[Graph, Profile]:
    sources = (args.model, args.profile, args.graph, args.dlrm_tables)
    if all(source is None for source in sources):
        raise ConfigError(f"--cost {args.cost} needs --model NAME or --profile FILE")
    if args.rates is not None and args.profile is not None:
        raise ConfigError("--rates estimates times and --profile reads them: give one of them")
    if args.model is not None and args.graph is not None:
        raise ConfigError("--model captures a graph and --graph reads one: give one of them")
    graph = load_graph(args.graph) if args.graph is not None else None
    if args.model is not None:
        if args.batch is None:
            raise ConfigError("--model needs --batch B, the global batch in samples")
        graph = capture_model(args.model, args.batch)
    if args.dlrm_tables is not None:
        graph = _dlrm(args)
    if args.rates is not None and graph is not None:
        return graph, _roofline(args.rates, graph, cluster)
    if args.profile is None:
        assert graph is not None
        return graph, _found_profile(args, cluster, graph) or estimate_profile(graph, cluster)
    return _profile(args, cluster, graph)


def _of_dtype(profile: Profile, dtype: str) -> Profile:
    """The measurements of one dtype; estimates stand for any."""
    if profile.provenance.get("source") in _ESTIMATES:
        return profile
    found = [point for point in profile.measurements if point.dtype == DTYPES[dtype]]
    if not found:
        known = ", ".join(sorted({point.dtype for point in profile.measurements}))
        raise ConfigError(
            f"--dtype {dtype}: the profile of {profile.model!r} has times of {known} only: "
            f"profile it with --dtype {dtype}"
        )
    if len(found) == len(profile.measurements):
        return profile
    return msgspec.structs.replace(profile, measurements=found)


def _dlrm(args: argparse.Namespace) -> Graph:
    if args.model is not None or args.graph is not None:
        raise ConfigError("--dlrm-tables describes a model of its own: drop --model and --graph")
    if args.batch is None:
        raise ConfigError("--dlrm-tables needs --batch B, the global batch in samples")
    flags = parse_dlrm(args.dlrm_tables, args.dlrm_bottom_mlp, args.dlrm_top_mlp, args.batch)
    return dlrm_graph(flags)


def _roofline(text: str, graph: Graph, cluster: Cluster) -> Profile:
    """Times of the cluster's devices by their rates, at each shard that a search may ask for."""
    parts = [parse_bandwidth(part) for part in text.split(",")]
    if len(parts) != 2:
        raise ConfigError(f"--rates {text!r} is not FLOPS,BYTES: write it like 9.3e12,549e9")
    rates = DeviceRates(flops_per_s=parts[0], memory_bytes_per_s=parts[1])
    return roofline_profile(
        graph,
        {device.kind: rates for device in cluster.devices},
        n_parts=range(1, cluster.n_devices + 1),
        n_microbatches=(1, 2, 4, 8, 16),
    )


def _found_profile(args: argparse.Namespace, cluster: Cluster, graph: Graph) -> Profile | None:
    """What the profile workload wrote for this model, if it knows these devices."""
    path = default_profile(graph.name if args.model is None else args.model)
    if not path.is_file():
        return None
    profile = Profile.load(path)
    return profile if knows(profile, graph, cluster) else None


def source_line(args: argparse.Namespace, request: PlanRequest) -> str:
    """Where the operators' times come from when the user named no profile; else empty."""
    if args.profile is not None or request.profile is None:
        return ""
    source = request.profile.provenance.get("source", "")
    if source != "measured":
        return (
            f"operator times are {source or 'of unknown source'}: `./entry.sh profile --model "
            f"{request.profile.model}` measures them"
        )
    return f"operator times are from {default_profile(request.profile.model)}"


def _profile(
    args: argparse.Namespace, cluster: Cluster, graph: Graph | None
) -> tuple[Graph, Profile]:
    try:
        data = args.profile.read_bytes()
    except OSError as error:
        raise GraphError(f"profile {args.profile}: {error.strerror}") from None
    if data.lstrip().startswith(b"{"):
        profile = Profile.from_json(data, source=str(args.profile))
        beside = graph_beside(args.profile)
        if graph is None and beside.is_file():
            graph = load_graph(beside)
        if graph is None:
            raise ConfigError(
                f"{args.profile} holds times of {profile.model!r} but no graph: give --model or "
                "--graph FILE too"
            )
        return graph, profile
    if graph is not None:
        raise ConfigError(f"{args.profile} brings its own graph: leave out --model and --graph")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise GraphError(
            f"profile {args.profile} is neither JSON nor a PipeDream graph.txt"
        ) from None
    return parse_graph_txt(
        text,
        name=args.profile.stem,
        batch=args.batch,
        device_kind=args.device_kind or cluster.devices[0].kind,
        source=str(args.profile),
    )


def strategy_bytes(strategy: object) -> bytes:
    """A strategy of any cost as an indented JSON file."""
    return msgspec.json.format(msgspec.json.encode(strategy), indent=1) + b"\n"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exits with 2 and a usage line when it is wrong."""
    return build_parser().parse_args(argv)

"""`python -m harness.plan import`: profile and cluster files from measurements of other tools."""

import argparse
from pathlib import Path

import msgspec

from harness.domain.cluster import Cluster, CollectivePoint
from harness.domain.graph import Graph
from harness.domain.profile import Profile, graph_beside
from harness.errors import ConfigError, naming
from harness.inputs import shorten
from harness.measure.places import make_directory
from harness.measure.store import write_atomically
from harness.plan.cli import cluster_from
from harness.plan.estimates import optimizer_times
from harness.plan.flags import add_cluster, flag_of
from harness.plan.importing.curves import (
    bandwidth_of,
    check_hosts,
    read_collectives,
    with_medians,
)
from harness.plan.importing.times import (
    TAKEN_OFF,
    LayerTime,
    TimeKey,
    add_uncut,
    layer_profile,
    read_layer_times,
    read_operators,
    without_collectives,
)
from harness.plan.notes import untimed_optimizer, whole_backward
from harness.plan.simulate.network import Network
from harness.units import parse_bandwidth

# What each of these flags is of.
_USERS = {
    **dict.fromkeys(("batch_size", "n_layers"), ("operators",)),
    **dict.fromkeys(("bandwidth", "memory"), ("topology",)),
    "ranks": ("collectives",),
    "memory_bandwidth": ("operators", "layer_times"),
    "device_kind": ("topology", "operators", "layer_times"),
}


def run(args: argparse.Namespace) -> None:
    """Write the files, and say what was assumed.

    Raises:
        HarnessError: a file is missing or malformed, or flags contradict each other.
    """
    for flag, least, most in (
        ("batch_size", 1, 2**31),
        ("n_layers", 1, 10_000),
        ("ranks", 2, 2**20),
    ):
        value = getattr(args, flag)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"{flag_of(flag)} is {shorten(value)}: give a number from {least} to {most}"
            )
    for flag, users in _USERS.items():
        if getattr(args, flag) is not None and not any(getattr(args, user) for user in users):
            words = " or ".join(map(flag_of, users))
            raise ConfigError(f"{flag_of(flag)} is of {words}: give that, or drop it")
    has_cluster = args.topology is not None or args.cluster is not None
    if not (args.operators or args.layer_times or args.topology or args.collectives):
        raise ConfigError("give --operators or --layer-times, or --topology for a cluster")
    if args.operators is not None and args.layer_times is not None:
        raise ConfigError("--operators and --layer-times are times of two models: give one of them")
    if args.collectives and not has_cluster:
        raise ConfigError("--collectives are a cluster's: give its --topology, or --cluster FILE")
    said: list[str] = []
    cluster = _cluster(args, said) if has_cluster else None
    model = _model(args, cluster, said)
    make_directory("--output", args.output)
    if cluster is not None:
        path = args.output / "cluster.json"
        write_atomically(path, cluster.to_json())
        said.insert(0, f"wrote {path}")
    if model is not None:
        graph, profile = model
        profile = _with_optimizers(args, profile, said)
        path = args.output / f"profile-{graph.name}.json"
        write_atomically(path, profile.to_json())
        write_atomically(graph_beside(path), graph.to_json())
        said.insert(0, f"wrote {path} and {graph_beside(path)}")
    print("\n".join(said))


def _cluster(args: argparse.Namespace, said: list[str]) -> Cluster:
    """The cluster with measured curves; links of a topology as fast as the curves where nobody
    says."""
    points = with_medians(
        p for path in args.collectives for p in read_collectives(path, args.ranks)
    )
    found = {point.n_ranks for point in points}
    if args.ranks is not None and args.ranks not in found:
        raise ConfigError(
            f"--ranks is {args.ranks}, and --collectives are of {shorten(sorted(found))} ranks: "
            "drop it"
        )
    needs_bandwidth = args.cluster is None and args.bandwidth is None
    if needs_bandwidth:
        if not points:
            raise ConfigError("--topology needs --bandwidth INSIDE[,BETWEEN], or --collectives")
        args.bandwidth = "1GB/s"  # until the curves say
    cluster = cluster_from(args)
    for path in args.collectives:  # before a bandwidth is asked for, which would not help
        check_hosts(path, cluster)
    if needs_bandwidth:
        args.bandwidth = _bandwidth(args.topology, cluster, points, said)
        cluster = cluster_from(args)
    if args.cluster is None:
        theirs = " of their own; the curves have theirs" if points else ""
        said.append(f"assumed: links have no latency{theirs}")
    elif points and cluster.collectives:
        said.append(f"dropped: the collectives that {args.cluster} has")
    if not points:
        return cluster
    cluster = msgspec.structs.replace(cluster, collectives=points)
    if len(cluster.nodes) > 1 and (inside := cluster.curves(spans_nodes=False)):
        n = max(point.n_ranks for point in inside)
        said.append(f"assumed: curves of up to {n} ranks, which fit into a node, are of one node")
    return cluster


def _bandwidth(
    topology: str, cluster: Cluster, points: list[CollectivePoint], said: list[str]
) -> str:
    """Of links inside nodes and between them, by their all-reduces of the fewest ranks."""
    sums = [point for point in points if point.operation == "all_reduce"]
    cluster = msgspec.structs.replace(cluster, collectives=sums)
    inside, between = (cluster.curves(spans_nodes=spans) for spans in (False, True))
    if not (between if len(cluster.nodes) > 1 else inside):
        of = f" of more ranks than a node of {topology} has" if inside else ""
        raise ConfigError(
            f"--collectives has no all-reduce{of}: give --bandwidth INSIDE[,BETWEEN] too"
        )
    rates = []
    for where, own in (("inside nodes", inside or between), ("between nodes", between)):
        if own:
            fewest = min(point.n_ranks for point in own)
            rate = bandwidth_of([point for point in own if point.n_ranks == fewest])
            rates.append(f"{rate:.6g}B/s")
            said.append(
                f"assumed: links {where} have {rate / 1e9:.3g} GB/s, by all-reduce of {fewest}"
            )
    return ",".join(rates)


def _model(
    args: argparse.Namespace, cluster: Cluster | None, said: list[str]
) -> tuple[Graph, Profile] | None:
    kind = args.device_kind or (cluster.devices[0].kind if cluster is not None else "device")
    if args.operators is not None:
        if args.batch_size is None:
            raise ConfigError("--operators needs --batch-size B, the samples of its step")
        said.append("assumed: an operator's time grows in proportion to its samples")
        said.append("assumed: parameters and outputs cost nothing: --operators has no bytes")
        with naming(args.operators):
            graph, profile = read_operators(
                args.operators, device_kind=kind, batch=args.batch_size, n_layers=args.n_layers or 1
            )
        if taken := profile.provenance.get(TAKEN_OFF):
            said.append(f"assumed: timing an operator takes {taken}, which are taken off")
        return graph, profile
    if args.layer_times is None:
        return None
    said.append("assumed: each layer reads the one before; parameters without bytes cost nothing")
    with naming(args.layer_times):
        graph, times = read_layer_times(args.layer_times, device_kind=kind)
        if any(key.tp > 1 for key in times):
            said.insert(-1, _take_off(graph, times, cluster))
        for of, tp in add_uncut(times).items():
            said.insert(
                -1,
                f"assumed: at tp 1 a layer takes {tp} times as long as at tp {tp}, the lowest on "
                f"{of}",
            )
        said += whole_backward(graph)
        return graph, layer_profile(graph, times, source=str(args.layer_times))


def _with_optimizers(args: argparse.Namespace, profile: Profile, said: list[str]) -> Profile:
    """Time the optimizer by the devices' memory, if a flag says how fast that is."""
    if args.memory_bandwidth is None:
        said += untimed_optimizer(profile, profile.device_kinds)
        return profile
    rate = parse_bandwidth(args.memory_bandwidth)
    if rate <= 0:
        raise ConfigError(f"--memory-bandwidth {args.memory_bandwidth} must be above 0")
    said.append("assumed: the optimizer reads and writes each of its tensors once")
    times = [time for kind in profile.device_kinds for time in optimizer_times(kind, rate)]
    return msgspec.structs.replace(profile, optimizers=times)


def _take_off(graph: Graph, times: dict[TimeKey, list[LayerTime]], cluster: Cluster | None) -> str:
    """Take collectives off times of tensor parallelism, if a cluster says how long they take."""
    if cluster is None:
        return "assumed: times at tp above 1 are without collectives, because no cluster is given"
    widest = max(key.tp for key in times)
    if widest > cluster.n_devices:
        raise ConfigError(
            f"--layer-times has times at tp {widest}, and the cluster {cluster.n_devices} devices, "
            "which cannot say how long their collectives take: give a larger one, or none"
        )
    network = Network(cluster)
    for key in [key for key in times if key.tp > 1]:
        times[key] = without_collectives(graph, network, key, times[key])
    return "assumed: times at tp above 1 were with collectives, which are taken off by the cluster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = (
        "Make profile and cluster files from times of layers or operators, and from curves of "
        "collectives (nccl-tests). Print the assumptions."
    )
    parser.add_argument(
        "--layer-times",
        type=Path,
        metavar="CSV",
        help="columns layer, tp, microbatch, forward_s, backward_s, and if known device_kind, "
        "parameter_bytes, output_bytes and saved_bytes (of one sample)",
    )
    parser.add_argument(
        "--operators",
        type=Path,
        metavar="CSV",
        help="columns Name, fw_latency and bw_latency, in ms",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="B", help="samples of the step in --operators"
    )
    parser.add_argument(
        "--n-layers",
        type=int,
        metavar="N",
        help="number of layers of the model, if --operators has only one of them (default: 1)",
    )
    parser.add_argument(
        "--memory-bandwidth",
        metavar="B/S",
        help="of each device's own memory, such as 2e12 or 2TB/s, by which the optimizer's step is "
        "timed (default: it takes no time)",
    )
    parser.add_argument(
        "--collectives",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="nccl-tests' output, or CSV with size(B) and time(us)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks of --collectives, if the files do not state it",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the files; it is made if missing",
    )
    add_cluster(parser)
    parser.set_defaults(cost="simulator", profile=None, model=None)

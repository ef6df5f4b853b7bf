"""The flags that commands of `python -m harness.plan` share, and the request that they make."""

import argparse
import codecs
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.domain.cluster import ANY_KIND, Cluster
from harness.domain.graph import Graph
from harness.domain.profile import DTYPE_NAMES, Profile, default_profile, graph_beside, knows
from harness.domain.strategy import Strategy
from harness.errors import (
    ConfigError,
    EnvironmentSetupError,
    GraphError,
    HarnessError,
    ModelError,
    naming,
)
from harness.inputs import MOST_COUNT, decode_text, find_int, read_file, shorten
from harness.measure.places import check_place
from harness.plan.costs import COSTS, PlanRequest, SearchProgress, ignore_progress
from harness.plan.estimates import (
    FROM_FLOPS,
    ROOFLINE,
    DlrmSizes,
    dlrm_graph,
    estimate_profile,
    parse_dlrm,
    rated_profile,
)
from harness.plan.flags import (
    DLRM_BOTTOM,
    DLRM_TOP,
    bandwidths_of,
    flag_of,
    model_sizes,
    optimizer_of,
    size_flags,
)
from harness.plan.formats.detect import read_strategy_file, strategy_from
from harness.plan.formats.pipedream import parse_graph_txt
from harness.plan.show import load_graph
from harness.units import parse_memory

_ESTIMATES = (FROM_FLOPS, ROOFLINE)


def request_from(
    args: argparse.Namespace,
    progress: Callable[[SearchProgress], None] = ignore_progress,
    *,
    check: Callable[[Cluster], None] = lambda cluster: None,
) -> PlanRequest:
    """Read the files that the flags name; print on stderr where times come from if no flag says.

    Args:
        check: refuses a cluster, before a model is captured.

    Raises:
        ConfigError: flags contradict each other.
        HarnessError: a file is missing or malformed.
    """
    _check_numbers(args)
    for name in COSTS[args.cost].unread:
        if getattr(args, name) is not None:
            raise ConfigError(f"--cost {args.cost} has no use for {flag_of(name)}: leave it out")
    optimizer = optimizer_of(args)
    imported = None if args.start is None else read_strategy_file(args.start)
    content = None if imported is None else imported.content
    start = content if isinstance(content, Strategy) else None
    if start is not None and args.graph is None and args.profile is None:
        args.batch_size = args.batch_size or start.batch  # to capture the model with
    cluster = cluster_from(args)
    check(cluster)
    graph, profile = None, None
    if "model" not in COSTS[args.cost].unread:
        graph, profile = _model(args, cluster, start)
        profile = profile if args.dtype is None else _of_dtype(profile, args.dtype)
    if profile is not None and args.profile is None:
        print(_source_line(args, profile), file=sys.stderr)
    batch = args.batch_size or (graph.batch if graph is not None else None)
    if imported is not None and start is None:
        with naming(args.start):
            start = strategy_from(imported, graph, batch)
    return PlanRequest(
        cluster=cluster,
        graph=graph,
        profile=profile,
        batch=batch,
        memory_bytes=_memory_of(args),
        budget=args.search_budget,
        seconds=args.search_seconds,
        start=start,
        shard_state=args.shard_state,
        optimizer=optimizer,
        reduce_dtype=args.reduce_dtype or "fp32",
        seed=args.seed,
        progress=progress,
    )


def _capture_model(args: argparse.Namespace) -> Graph:
    """Capture by torch, which only this needs; what the model's code prints goes to stderr."""
    name: str = args.model
    try:
        capture = importlib.import_module("harness.runtime.capture.capture")
        models = importlib.import_module("harness.runtime.models")
        task = importlib.import_module("harness.runtime.models.task")
        failures = importlib.import_module("harness.runtime.ranks.failures")
    except ImportError as error:
        raise EnvironmentSetupError(
            f"--model {name} needs torch to capture the model ({error}): install it, or plan from "
            "files with --profile and --graph"
        ) from None
    try:
        kind = models.input_kind(name)
        sizes = model_sizes(args, kind)
        given = {"text": task.TextOptions(**sizes)} if kind == "text" else sizes
        with contextlib.redirect_stdout(sys.stderr):
            options = task.ModelOptions(**given)
            graph: Graph = capture.capture_model(name, args.batch_size, options)
    except HarnessError:
        raise
    except Exception as error:
        reason = failures.located(error).partition("\n")[0]
        raise ModelError(f"--model {name} fails: {reason}") from error
    return graph


def check_output(path: Path | None) -> None:
    """Refuse a place where no file can be written, before a search that may take long."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}: make it first")
    if path.is_dir():
        raise ConfigError(f"--output {path} is a directory: name a file")
    check_place("--output", path)


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("batch_size", "search_budget", "search_seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= MOST_COUNT:
            raise ConfigError(
                f"{flag_of(name)} {shorten(value)} must be above 0, and at most 2**53"
            )


def _memory_of(args: argparse.Namespace) -> int | None:
    """Bytes that each device may use; None where no flag says."""
    return None if args.memory is None else parse_memory(args.memory)


def _check_there(name: str, path: Path, remedy: str) -> None:
    """Refuse a missing file with the command that writes it."""
    if not path.exists():
        raise ConfigError(f"{name}: {os.strerror(errno.ENOENT)}: {remedy}")


def parse_topology(text: str, most_devices: int) -> tuple[int, int]:
    """Nodes and devices per node of `4x4`; a single number is one node.

    Raises:
        ConfigError: anything else.
    """
    nodes, _, devices = text.lower().rpartition("x")
    n_nodes, n_devices = find_int(nodes or "1", at_least=1), find_int(devices, at_least=1)
    if n_nodes is None or n_devices is None or text[:1] in "xX":
        raise ConfigError(f"--topology {shorten(text)} is not NODESxDEVICES: write it like 4x4")
    if n_nodes * n_devices > most_devices:
        raise ConfigError(
            f"--topology {text} has {n_nodes * n_devices} devices: {most_devices} are the most"
        )
    return n_nodes, n_devices


def cluster_from(args: argparse.Namespace) -> Cluster:
    """The cluster of `--cluster` or `--topology`; raises ConfigError without one."""
    if (args.cluster is None) == (args.topology is None):
        raise ConfigError("give either --cluster FILE or --topology NODESxDEVICES")
    if args.cluster is not None:
        if args.bandwidth is not None:
            raise ConfigError("--bandwidth goes with --topology: a cluster file has its own links")
        _check_there(
            f"cluster file {args.cluster}", args.cluster,
            "./entry.sh links writes results/cluster.json; without measurements give --topology "
            "or results/sample-links/cluster.json",
        )  # fmt: skip
        return Cluster.load(args.cluster, is_given=True)
    n_nodes, n_devices = parse_topology(args.topology, COSTS[args.cost].most_devices)
    inside, between = _bandwidths(args)
    if n_nodes == 1 and between is not None:
        raise ConfigError(
            f"--topology {args.topology!r} is one node, and --bandwidth {args.bandwidth} has a "
            f"BETWEEN, which joins nodes: drop it, or write {n_devices}x1 for {n_devices} nodes"
        )
    memory = _memory_of(args)
    if memory is None and COSTS[args.cost].needs_memory:
        raise ConfigError("--topology needs --memory BYTES, what each device may use, such as 12GB")
    return Cluster.uniform(
        n_nodes,
        n_devices,
        inside_bytes_per_s=inside,
        between_bytes_per_s=between,
        memory_bytes=2**50 if memory is None else memory,
        kind=args.device_kind or _profiled_kind(args) or ANY_KIND,
    )


def planned_for(args: argparse.Namespace, strategy: Strategy) -> Strategy:
    """The strategy as it is written: for the devices of `--cluster`, or for any as many as those of
    `--topology`, which do not exist."""
    if args.topology is None:
        return strategy
    return msgspec.structs.replace(strategy, made_for=strategy.made_for.of_any_devices())


def _profiled_kind(args: argparse.Namespace) -> str | None:
    """The kind of device of the profile that gives the times; None when it does not say."""
    path = args.profile
    if path is None and args.model is not None and args.rates is None:
        path = _default_profile(args, args.model)
    if path is None or not path.is_file():
        return None
    data = read_file(path, "profile", GraphError)
    if not _is_json(data):
        return None
    kinds = Profile.from_json(data, source=str(path)).device_kinds
    return kinds[0] if kinds else None


def _bandwidths(args: argparse.Namespace) -> tuple[float, float | None]:
    if args.bandwidth is None:
        if "bandwidth" not in COSTS[args.cost].unread:
            raise ConfigError("--topology needs --bandwidth INSIDE[,BETWEEN], such as 1e10,1.25e9")
        return 1.0, None  # nobody reads it
    return bandwidths_of(args.bandwidth)


_GRAPHS = ("model", "graph", "dlrm_tables")  # arguments that give a graph


def _graph(args: argparse.Namespace) -> Graph | None:
    """The graph of a flag; None where the profile brings it."""
    given = [name for name in _GRAPHS if getattr(args, name) is not None]
    if not given and args.profile is None:
        raise ConfigError(f"--cost {args.cost} needs --model NAME or --profile FILE")
    if len(given) > 1:
        flags = " and ".join(map(flag_of, given))
        raise ConfigError(f"{flags} give a graph each: give one of them")
    if args.model is None and (sizes := size_flags(args)):
        raise ConfigError(f"{next(iter(sizes))} is a size of --model, which is not given")
    if args.dlrm_tables is None and (args.dlrm_bottom_mlp or args.dlrm_top_mlp):
        raise ConfigError(
            "--dlrm-bottom-mlp and --dlrm-top-mlp are of --dlrm-tables: give that too"
        )
    if given not in ([], ["graph"]) and args.batch_size is None:
        raise ConfigError(f"{flag_of(given[0])} needs --batch-size B, the global batch in samples")
    if args.model is not None:
        return _capture_model(args)
    if args.dlrm_tables is not None:
        return dlrm_graph(_dlrm_sizes(args))
    return None if args.graph is None else load_graph(args.graph)


def _model(
    args: argparse.Namespace, cluster: Cluster, start: Strategy | None
) -> tuple[Graph, Profile]:
    if args.rates is not None and args.profile is not None:
        raise ConfigError("--rates estimates times and --profile reads them: give one of them")
    graph = _graph(args)
    if args.profile is not None:
        return _profile(args, cluster, graph, start)
    _refuse_kind(args)
    assert graph is not None
    if args.rates is not None:
        return graph, rated_profile(args.rates, graph, cluster)
    path = _default_profile(args, args.model or graph.name)
    profile = Profile.load(path) if path.is_file() else None
    if profile is not None and knows(profile, graph, cluster):
        return graph, profile
    return graph, estimate_profile(graph, cluster, args.dtype or "fp32")


def _of_dtype(profile: Profile, dtype: str) -> Profile:
    """The measurements of one dtype; estimates are of that dtype, which says what is kept and sent
    in 16 bits."""
    if profile.provenance.get("source") in _ESTIMATES:
        made = [
            msgspec.structs.replace(point, dtype=DTYPE_NAMES[dtype])
            for point in profile.measurements
        ]
        unique = {point.key: point for point in made}
        return msgspec.structs.replace(profile, measurements=list(unique.values()))
    found = [point for point in profile.measurements if point.dtype == DTYPE_NAMES[dtype]]
    if not found:
        known = ", ".join(sorted({point.dtype for point in profile.measurements}))
        raise ConfigError(
            f"--dtype {dtype}: the profile of {profile.model!r} has times of {known} only: "
            f"profile it with --dtype {dtype}"
        )
    steps = [step for step in profile.whole_steps if step.dtype == DTYPE_NAMES[dtype]]
    return msgspec.structs.replace(profile, measurements=found, whole_steps=steps)


def _dlrm_sizes(args: argparse.Namespace) -> DlrmSizes:
    bottom, top = args.dlrm_bottom_mlp or DLRM_BOTTOM, args.dlrm_top_mlp or DLRM_TOP
    return parse_dlrm(args.dlrm_tables, bottom, top, args.batch_size)


def _source_line(args: argparse.Namespace, profile: Profile) -> str:
    """Where the operators' times come from."""
    source = profile.provenance.get("source", "")
    if source != "measured":
        words = {
            "": "of unknown source",
            ROOFLINE: "estimated from --rates",
            FROM_FLOPS: f"{FROM_FLOPS} and {args.dtype or 'fp32'} matmul rates",
        }.get(source, source)
        sizes = [f"{flag} {size}" for flag, size in size_flags(args).items()]
        if args.dlrm_tables is not None:
            dlrm = _dlrm_sizes(args)
            rows = (dlrm.rows,) * dlrm.n_tables
            lists = {"table-rows": rows, "bottom-mlp": dlrm.bottom, "top-mlp": dlrm.top}
            sizes = [f"--dlrm-{k} {' '.join(map(str, counts))}" for k, counts in lists.items()]
        batch = [] if args.batch_size is None else [f"--batch-size {args.batch_size}"]
        dtype = [] if args.dtype in (None, "fp32") else [f"--dtype {args.dtype}"]
        command = " ".join([f"./entry.sh profile --model {profile.model}", *sizes, *batch, *dtype])
        return f"operator times are {words}: `{command}` measures them"
    return f"operator times are from {_default_profile(args, profile.model)}"


def _default_profile(args: argparse.Namespace, model: str) -> Path:
    results = getattr(args, "results", None)  # of advise
    given = () if results is None else (results,)
    return default_profile(model, args.dtype or "fp32", *given)


def _profile(
    args: argparse.Namespace, cluster: Cluster, graph: Graph | None, start: Strategy | None
) -> tuple[Graph, Profile]:
    _check_there(
        f"profile {args.profile}", args.profile,
        "./entry.sh profile --model MODEL writes results/profile-MODEL.json; without measurements "
        "give --model, or --rates",
    )  # fmt: skip
    data = read_file(args.profile, "profile", GraphError, is_given=True)
    if _is_json(data):
        _refuse_kind(args)
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
    graph, profile = parse_graph_txt(
        decode_text(data, f"profile {args.profile}", GraphError),
        name=args.profile.stem,
        batch=args.batch_size or (None if start is None else start.batch),
        device_kind=args.device_kind or cluster.devices[0].kind,
        source=str(args.profile),
    )
    if not any(point.backward_s > 0 for point in profile.measurements):
        raise GraphError(
            f"profile {args.profile} has backward_compute_time=0 for every operator, and training "
            "has a backward pass: profile it too, or write what it takes (about twice the forward)"
        )
    return graph, profile


def _refuse_kind(args: argparse.Namespace) -> None:
    """Refuse a kind of device where files have named the kinds of devices and times."""
    if args.cluster is not None and args.device_kind is not None:
        raise ConfigError(
            "--device-kind is of the devices of --topology, or of the times in a graph.txt: the "
            f"devices of {args.cluster} have their kinds, so drop it"
        )


def _is_json(data: bytes) -> bool:
    return data.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"

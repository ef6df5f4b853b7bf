"""The links workload: measure every link and collective, and write the cluster file."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.domain.cluster import CLUSTER_FILE, CollectivePoint
from harness.errors import ConfigError
from harness.measure.derive.links import (
    CollectiveRow,
    LinkMatrix,
    above_link_text,
    best_links_bytes_per_s,
    collective_table,
    disturbed_text,
    link_matrices,
    link_noise,
    nic_limit_bytes_per_s,
    overhead_table,
    slow_text,
)
from harness.measure.places import check_place
from harness.measure.store import Run, read_header, write_atomically
from harness.measure.text import columns, for_each_run
from harness.runtime.devices.sampling import Budget
from harness.runtime.ranks.world import Context
from harness.units import format_bandwidth, format_bytes, format_duration, parse_bytes
from harness.workloads.common.contract import Workload
from harness.workloads.common.flags import check_above_zero, check_at_least, flag
from harness.workloads.links.operations import (
    OPERATIONS,
    Limits,
    MpiTransport,
    TorchTransport,
    Transport,
    measure_collectives,
)
from harness.workloads.links.overhead import measure_overhead
from harness.workloads.links.pairs import (
    Pair,
    PairTimes,
    build_cluster,
    measure_pairs,
    measured_flops,
)
from harness.workloads.planning.files import is_complete

_log = logging.getLogger(__name__)

_LARGEST_BYTES = 8 << 30
_LONGEST_S = 0.5


@dataclass(frozen=True, kw_only=True)
class LinksConfig:
    """Measure latency and bandwidth of each link and collective; write the cluster file."""

    operations: tuple[str, ...] = tuple(OPERATIONS)
    f"""Collectives to time: {", ".join(OPERATIONS)}."""
    sizes: tuple[str, ...] = ()
    """Message sizes of the collectives, such as 4KiB 16MiB. For collectives that gather, scatter or
    exchange parts, a size is the buffer of all ranks together, as in nccl-tests. Default: 4KiB to
    16MiB (GPUs: 256MiB), without sizes that would take over 0.5 s per iteration."""
    pair_sizes: tuple[str, ...] = ()
    """Message sizes between pairs of ranks, from which bandwidth is fitted. Default: 256KiB and
    4MiB (GPUs: 1MiB and 64MiB), up to the first size that takes over 0.5 s."""
    measure: Literal["all", "pairs", "collectives"] = "all"
    """pairs: links between pairs of ranks; collectives: operations over all ranks; all: both, and
    how much communication slows computing."""
    transport: Literal["all", "torch", "mpi"] = "all"
    """torch: torch.distributed (NCCL or gloo), which training uses; mpi: MPI on host memory; all:
    both, or torch only if MPI did not start the ranks."""
    time_budget_s: float = 0.1
    """Seconds to sample each operation at each size, within --min-samples and --max-samples."""
    min_samples: int = 4
    """Minimum number of samples of each operation at each size."""
    max_samples: int = 100
    """Maximum number of samples of each operation at each size."""
    warm_up: int = 1
    """Discarded iterations before the samples; the first iteration opens connections."""
    cluster_file: Path | None = None
    """Where to write the cluster file, beside the copy in the run's directory. Default:
    cluster.json in the results directory, replaced only by runs that measure everything that
    planning needs."""

    @property
    def longest_wait_s(self) -> float:
        """How long ranks may wait in a collective for a rank that samples."""
        return self.time_budget_s


def links_cases(config: LinksConfig, n_ranks: int) -> list[LinksConfig]:
    """Check the flags and return one run."""
    unknown = [name for name in config.operations if name not in OPERATIONS]
    if unknown or not config.operations:
        raise ConfigError(
            f"operations {unknown or 'none'} are not among {', '.join(OPERATIONS)}: choose some"
        )
    for name, user in (("operations", "pairs"), ("sizes", "pairs"), ("pair_sizes", "collectives")):
        if config.measure == user and getattr(config, name) != getattr(LinksConfig(), name):
            raise ConfigError(
                f"--measure {user} has no use for {flag(name)}: drop it, or --measure {user}"
            )
    for text in (*config.sizes, *config.pair_sizes):
        if not 0 < parse_bytes(text) <= _LARGEST_BYTES:
            raise ConfigError(f"message size {text!r} is outside 1 B to 8GiB: write it like 16MiB")
    check_at_least(config, {"min_samples": 1, "warm_up": 1})
    check_above_zero(config, ("time_budget_s",))
    if config.max_samples < config.min_samples:
        raise ConfigError(
            f"--min-samples {config.min_samples} and --max-samples "
            f"{config.max_samples}: the first must be no larger than the second"
        )
    return [config]


def _sizes(given: tuple[str, ...], default: tuple[str, ...]) -> list[int]:
    return sorted({parse_bytes(text) for text in given or default})


def _transports(config: LinksConfig, context: Context) -> list[Transport]:
    """Make the transports of --transport, torch first."""
    world, clock = context.world, context.recorder.clock
    if config.transport == "mpi" and world.mpi is None:
        raise ConfigError("--transport mpi needs ranks that mpirun started: use mpirun, or torch")
    found: list[Transport] = []
    if config.transport in ("all", "torch"):
        found.append(TorchTransport.of(world, clock))
    if config.transport in ("all", "mpi") and world.mpi is not None:
        found.append(MpiTransport(world.mpi))
    return found


def _limits(config: LinksConfig, has_sizes: bool) -> Limits:
    budget = Budget(
        time_s=config.time_budget_s,
        n_min=config.min_samples,
        n_max=config.max_samples,
        n_warm_up=config.warm_up,
    )
    return Limits(budget=budget, longest_s=float("inf") if has_sizes else _LONGEST_S)


def run_links(config: LinksConfig, context: Context) -> dict[str, Any]:
    """Measure pairs, then collectives, over each transport, then the overhead on computing.

    Rank 0 writes the cluster file.

    Raises:
        VerificationError: data arrived wrong.
    """
    world = context.world
    larger = ("64MiB", "256MiB") if world.backend == "nccl" else ()
    sizes = _sizes(config.sizes, ("4KiB", "64KiB", "1MiB", "4MiB", "16MiB", *larger))
    of_pairs = ("1MiB", "64MiB") if world.backend == "nccl" else ("256KiB", "4MiB")
    pair_sizes = _sizes(config.pair_sizes, of_pairs)
    pairs: dict[str, dict[Pair, PairTimes]] = {}
    points: list[CollectivePoint] = []
    left_out: list[str] = []
    transports = _transports(config, context)
    for transport in transports:
        if config.measure in ("all", "pairs"):
            limits = _limits(config, bool(config.pair_sizes))
            pairs[transport.name], slow = measure_pairs(pair_sizes, transport, context, limits)
            left_out += slow
        if config.measure in ("all", "collectives"):
            limits = _limits(config, bool(config.sizes))
            found = measure_collectives(list(config.operations), sizes, transport, context, limits)
            points += found[0]
            left_out += found[1]
    overhead = measure_overhead(context) if config.measure == "all" else []
    if world.is_first:
        first = pairs.get(transports[0].name, {})
        _write_cluster(config, context, first, points, overhead)
    return {"left_out": left_out}


def _write_cluster(
    config: LinksConfig,
    context: Context,
    pairs: dict[Pair, PairTimes],
    points: list[CollectivePoint],
    overhead: list[float],
) -> None:
    """Write links over the first transport, which training uses, and collectives over all."""
    results = context.run_dir.parent
    header = read_header(context.run_dir)
    rates = measured_flops(results, header)
    cluster = build_cluster(header, pairs, points, rates, overhead)
    written, shared = [context.run_dir / CLUSTER_FILE], results / CLUSTER_FILE
    is_first = not shared.exists() and (bool(pairs) or context.world.size == 1)
    if config.cluster_file is not None:
        written.append(config.cluster_file)
    elif config.transport != "mpi" and (is_first or (pairs and is_complete(asdict(config)))):
        written.append(shared)
    for path in written:
        write_atomically(path, cluster.to_json())
        _log.info("wrote %s", path)


@for_each_run
def links_text(run: Run) -> list[str]:
    left_out = run.header.texts("left_out")
    matrices, rows, best = link_matrices(run), collective_table(run), best_links_bytes_per_s(run)
    return [
        *(_matrix(run, matrix) for matrix in matrices),
        _collectives(run, rows, best),
        _overhead(run),
        "\n".join(f"warning: {text}" for text in link_noise(rows, matrices)),
        "\n".join(f"left out: {text}" for text in left_out),
    ]


def _matrix(run: Run, matrix: LinkMatrix) -> str:
    """Latency and bandwidth of every pair, each with its spread."""
    heads = [f"{matrix.transport} from \\ to", *matrix.names]
    parts = []
    for title, show in (
        ("half round trip, shortest (median)", _latency),
        (f"bandwidth at {format_bytes(matrix.n_bytes)} (CV)", _bandwidth),
    ):
        rows = [
            [name, *(show(matrix, (source, target)) for target in range(len(matrix.names)))]
            for source, name in enumerate(matrix.names)
        ]
        parts.append(f"{title}, one pair at a time:\n{columns(heads, rows)}")
    doubts = filter(None, (slow_text(run, matrix), disturbed_text(matrix)))
    return "\n".join(["\n\n".join(parts), *(f"warning: {doubt}" for doubt in doubts)])


def _latency(matrix: LinkMatrix, pair: Pair) -> str:
    latency_s, median_s = float(matrix.latency_s[pair]), float(matrix.median_latency_s[pair])
    if np.isnan(latency_s):
        return "-"
    return f"{format_duration(latency_s)} ({format_duration(median_s)})"


def _bandwidth(matrix: LinkMatrix, pair: Pair) -> str:
    bandwidth = float(matrix.bandwidth_bytes_per_s[pair])
    if np.isnan(bandwidth):
        return "-"
    return f"{format_bandwidth(bandwidth)} ({matrix.transfers[pair].cv:.0%})"


def _collectives(run: Run, rows: Sequence[CollectiveRow], best: Mapping[str, float]) -> str:
    limit = nic_limit_bytes_per_s(run)
    name = "of best link" if limit is None else "of NIC limit"
    heads = ["operation", "transport", "size", "time", "CV", "algbw", "busbw", name]
    lines = [columns(heads, [_cells(row, limit or best.get(row.transport)) for row in rows])]
    if doubt := above_link_text(run, rows, best):
        lines.append(f"warning: rows with !: {doubt}")
    return "\n".join(lines)


def _overhead(run: Run) -> str:
    rows = [
        [row.name, f"{row.speed:.0%}", _taken(row.taken_s_per_byte)] for row in overhead_table(run)
    ]
    return columns(["computing on", "speed during send_recv", "overhead per byte"], rows)


def _taken(seconds: float) -> str:
    return f"{seconds * 1e9:.2f} ns" if seconds < 1e-6 else format_duration(seconds)


def _cells(row: CollectiveRow, limit: float | None) -> list[str]:
    return [
        row.operation,
        row.transport,
        format_bytes(row.n_bytes),
        format_duration(row.time.median),
        f"{row.time.cv:.0%}",
        format_bandwidth(row.algbw),
        format_bandwidth(row.busbw),
        _share(row.busbw / limit) if limit else "-",
    ]


def _share(share: float) -> str:
    return f"{share:.0%}" + (" !" if share > 1 else "")


WORKLOAD = Workload(
    renamed={"--min-iterations": "--min-samples", "--max-iterations": "--max-samples"},
    config=LinksConfig,
    cases=links_cases,
    body=run_links,
    table=links_text,
    check=lambda config, _: check_place("--cluster-file", config.cluster_file),
    is_isolated=False,
)

"""The matmul workload: FLOP/s of each device, and of all devices on one product."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.errors import ConfigError
from harness.measure.derive.devices import (
    MatmulRow,
    MemoryRow,
    SummaRow,
    best_products,
    low_peak_warnings,
    matmul_table,
    memory_table,
    product_noise,
    summa_table,
)
from harness.measure.derive.spans import samples_of
from harness.measure.store import Run
from harness.measure.text import cell, columns, for_each_run, rate_interval_words
from harness.runtime.devices.memory import record_peaks
from harness.runtime.devices.sampling import Budget
from harness.runtime.ranks.gather import gather_numbers, gather_values, wait_for_all
from harness.runtime.ranks.world import Context, World
from harness.units import format_bandwidth, format_bytes, format_duration, format_flops
from harness.workloads.common.contract import Workload
from harness.workloads.common.flags import DTYPES, check_above_zero, check_at_least, check_dtypes
from harness.workloads.matmul.local import (
    Unmeasured,
    measure_memory,
    measure_products,
    unsupported_reason,
)
from harness.workloads.matmul.scaling import (
    DistributedProduct,
    check_memory,
    measure_point,
    points_of,
    rank_counts,
)

_SMALLEST, _LARGEST = 8, 1 << 17


@dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """Time matrix products on each device, and one product over all devices."""

    sizes: tuple[int, ...] = ()
    """Sizes n of the n x n products on each device. Default: 1024 to 16384 on a GPU, 256 to 1024 on
    a CPU."""
    dtype: tuple[str, ...] = ()
    """fp32, tf32, bf16 or fp16. Default: all dtypes that the device has hardware for."""
    time_budget_s: float = 0.6
    """Seconds for which each product is sampled, unless --min-samples takes longer."""
    min_samples: int = 5
    """Minimum number of samples of each product."""
    in_turn: bool = False
    """Measure one rank after another, for ranks that share a host's memory bandwidth or power."""
    scaling: Literal["both", "strong", "weak", "none"] = "both"
    """Distribute one product over 1, 2, ... all ranks. strong: the same size for any number of
    ranks; weak: a size that keeps the FLOPs per rank; none: no distributed product."""
    distributed_dtype: str = "fp32"
    """Data type of the distributed products."""
    strong_size: int | None = None
    """Size n of the product for strong scaling. Default: 16384 on GPUs, 1536 on CPUs."""
    weak_size: int | None = None
    """Size n of the product on one rank for weak scaling. Default: 8192 on GPUs, 1024 on CPUs."""
    distributed_samples: int = 5
    """Samples of each distributed product, after a discarded warm-up."""

    @property
    def longest_wait_s(self) -> float:
        """How long ranks may wait in a collective for a rank that samples."""
        return self.time_budget_s


def matmul_cases(config: MatmulConfig, n_ranks: int) -> list[MatmulConfig]:
    """Check the flags and return one run."""
    check_dtypes((*config.dtype, config.distributed_dtype))
    distributed = [s for s in (config.strong_size, config.weak_size) if s is not None]
    sizes = (*config.sizes, *distributed)
    for size in sizes:
        if not _SMALLEST <= size <= _LARGEST:
            raise ConfigError(
                f"size {size} is outside {_SMALLEST} to {_LARGEST}: give a square matrix's rows"
            )
    for size in distributed:
        if config.scaling != "none" and size < 8 * n_ranks:
            raise ConfigError(
                f"a product of size {size} over {n_ranks} ranks leaves blocks of a few rows: "
                f"use at least {8 * n_ranks}"
            )
    check_at_least(config, {"min_samples": 1, "distributed_samples": 1})
    check_above_zero(config, ("time_budget_s",))
    return [config]


def _sizes(config: MatmulConfig, world: World) -> list[int]:
    default = (1024, 2048, 4096, 8192, 16384) if world.device.type == "cuda" else (256, 512, 1024)
    return list(config.sizes or default)


def _dtypes(config: MatmulConfig, world: World) -> list[str]:
    """Dtypes of --dtype, and that of the distributed product, whose block sizes depend on it."""
    if config.dtype:
        given = list(config.dtype)
    else:
        given = [dtype for dtype in DTYPES if not unsupported_reason(dtype, world.device)]
    distributed = [] if config.scaling == "none" else [config.distributed_dtype]
    return list(dict.fromkeys([*given, *distributed]))


def _measure_device(
    config: MatmulConfig, context: Context
) -> tuple[dict[str, float], list[Unmeasured], dict[str, float]]:
    budget = Budget(time_s=config.time_budget_s, n_min=config.min_samples)
    sizes, dtypes = _sizes(config, context.world), _dtypes(config, context.world)
    best, skipped = measure_products(sizes, dtypes, context, budget)
    return best, skipped, measure_memory(context, budget)


def _points(config: MatmulConfig, world: World, has_gpus: bool) -> list[DistributedProduct]:
    counts = rank_counts(world.size)
    strong = config.strong_size or (16384 if has_gpus else max(1536, 8 * world.size))
    weak = config.weak_size or (8192 if has_gpus else 1024)
    points: list[DistributedProduct] = []
    if config.scaling in ("both", "strong"):
        points += points_of("strong", strong, counts)
    if config.scaling in ("both", "weak"):
        points += points_of("weak", weak, counts)
    return points


def _speeds(
    dtype: str, context: Context, best: dict[str, float], skipped: list[Unmeasured]
) -> list[float]:
    """FLOP/s of every rank's device in a dtype.

    Raises:
        ConfigError: a device was not measured in the dtype; raised on every rank.
    """
    world = context.world
    speeds = gather_numbers(best.get(dtype, 0.0), world)
    texts = [f"size {row.size}: {row.reason}" for row in skipped if row.dtype == dtype]
    reasons = gather_values("".join(texts[:1]), str, world)  # the reason at the smallest size
    failed = [rank for rank, speed in enumerate(speeds) if speed <= 0]
    if failed:
        raise ConfigError(
            f"rank {failed[0]} ({world.hostnames[failed[0]]}) cannot multiply in {dtype}, which "
            f"the distributed product needs ({reasons[failed[0]]}): choose smaller "
            "--sizes, another --distributed-dtype or --scaling none"
        )
    return speeds


def _measure_distributed(
    config: MatmulConfig, context: Context, best: dict[str, float], skipped: list[Unmeasured]
) -> list[dict[str, Any]]:
    world, dtype = context.world, config.distributed_dtype
    speeds = _speeds(dtype, context, best, skipped)
    has_gpus = min(gather_numbers(float(world.device.type == "cuda"), world)) > 0
    points = _points(config, world, has_gpus)
    check_memory(points, dtype, world)
    rows = []
    for done, point in enumerate(points):
        context.progress.update("distributed matmul", done, len(points), f"{point.n_ranks} ranks")
        rows.append(measure_point(point, dtype, speeds, context, config.distributed_samples))
    context.progress.update("distributed matmul", len(points), len(points))
    return rows


def run_matmul(config: MatmulConfig, context: Context) -> dict[str, Any]:
    """Measure each device, then one product on 1, 2, ... all ranks.

    Raises:
        VerificationError: a product is wrong, or its rate is above the device's peak.
        ConfigError: a device cannot compute its block of the distributed product.
    """
    world = context.world
    for turn in range(world.size if config.in_turn else 1):
        if not config.in_turn or turn == world.rank:
            best, skipped, memory = _measure_device(config, context)
        wait_for_all(world)
    rows = [] if config.scaling == "none" else _measure_distributed(config, context, best, skipped)
    record_peaks(world.device, context.recorder)
    return {
        "flops_per_s": best,
        "memory_copy_bytes_per_s": memory["memory_copy_s"],
        "memory_triad_bytes_per_s": memory["memory_triad_s"],
        "skipped": [f"size {row.size}: {row.reason}" for row in skipped],
        "distributed": rows,
    }


@for_each_run
def matmul_text(run: Run) -> list[str]:
    products, memory, summa = matmul_table(run), memory_table(run), summa_table(run)
    doubts = [*low_peak_warnings(summa), *product_noise(products, memory, summa)]
    warnings = "\n".join(f"warning: {text}" for text in doubts)
    return [_devices(products), _memory(memory), _skipped(run), _distributed(summa), warnings]


def _devices(rows: Sequence[MatmulRow]) -> str:
    """One row per device and dtype, at the size with the best rate."""
    heads = ["device", "dtype", "best n", "median", "99% interval", "max", "of peak", "error"]
    return columns(heads, [_device_cells(row) for row in best_products(rows)])


def _device_cells(row: MatmulRow) -> list[str]:
    peak = row.peak_flops_per_s
    return [
        f"{row.rank} {row.hostname}",
        row.dtype,
        str(row.n),
        format_flops(row.flops_per_s),
        rate_interval_words(row.time, 2.0 * row.m * row.n * row.k, format_flops),
        format_flops(row.max_flops_per_s),
        f"{row.flops_per_s / peak:.0%}" if peak else "-",
        cell(row.error, ".1e"),
    ]


def _memory(rows: Sequence[MemoryRow]) -> str:
    cells = [
        [
            f"{row.rank} {row.hostname}",
            row.kernel,
            format_bytes(row.n_bytes),
            format_bandwidth(row.bytes_per_s),
            rate_interval_words(row.time, row.bytes_per_s * row.time.median, format_bandwidth),
        ]
        for row in rows
    ]
    return columns(["device", "memory", "array", "median", "99% interval"], cells)


def _skipped(run: Run) -> str:
    """Return a line for each reason why a size and dtype was not measured."""
    reasons: dict[str, list[int]] = {}
    for rank, records in sorted(run.ranks.items()):
        for record in samples_of(records, "matmul_skipped"):
            text = f"size {record.labels['n']}: {record.labels['reason']}"
            reasons.setdefault(text, []).append(rank)
    return "\n".join(f"skipped on ranks {ranks}: {text}" for text, ranks in reasons.items())


def _distributed(rows: Sequence[SummaRow]) -> str:
    heads = ["scaling", "dtype", "n", "ranks", "time", "rate", "of local sum", "compute",
             "communication", "exposed"]  # fmt: skip
    return columns(heads, [_summa_cells(row) for row in rows])


def _summa_cells(row: SummaRow) -> list[str]:
    parts = (row.compute_s, row.communication_s, row.exposed_communication_s)
    return [
        row.scaling,
        row.dtype,
        str(row.n),
        str(row.n_ranks),
        format_duration(row.time.median),
        format_flops(row.flops_per_s),
        cell(row.efficiency, ".0%"),
        *(cell(part, format_duration) for part in parts),
    ]


WORKLOAD = Workload(
    renamed={"--dtypes": "--dtype", "--repeats": "--distributed-samples"},
    config=MatmulConfig,
    cases=matmul_cases,
    body=run_matmul,
    table=matmul_text,
)

"""The matmul workload: how fast is each device, and all of them on one product?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from harness.errors import ConfigError
from harness.runtime.devices.memory import peak_bytes
from harness.runtime.devices.sampling import Budget
from harness.runtime.ranks.broadcast import wait_for_all
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.gather import gather_bytes, gather_numbers
from harness.runtime.ranks.world import World
from harness.workloads.common.contract import Workload
from harness.workloads.common.number_flags import check_above_zero, check_at_least
from harness.workloads.matmul.local import (
    Unmeasured,
    measure_memory,
    measure_products,
    unsupported_reason,
)
from harness.workloads.matmul.product import DTYPES
from harness.workloads.matmul.scaling import (
    Point,
    check_memory,
    measure_point,
    points_of,
    rank_counts,
)
from harness.workloads.matmul.table import matmul_text

_SMALLEST, _LARGEST = 8, 1 << 17


@dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """How fast each device multiplies, alone and together with the others."""

    sizes: tuple[int, ...] = ()
    """Sizes n of the n x n products; by default 1024 to 16384 on a GPU, 256 to 1024 on a CPU."""
    dtype: tuple[str, ...] = ()
    """Any of fp32, tf32, bf16, fp16; by default all that the device has hardware for."""
    time_budget_s: float = 0.6
    """Sample each product for about this long, but never fewer than --min-samples times."""
    min_samples: int = 5
    """Fewest samples of each product."""
    in_turn: bool = False
    """Measure one rank after another: for ranks that share a host's memory or power."""
    scaling: Literal["both", "strong", "weak", "none"] = "both"
    """Distribute one product over 1, 2, ... all ranks: the same product (strong), or one that
    grows with the number of ranks (weak)."""
    distributed_dtype: str = "fp32"
    """dtype of the distributed products."""
    strong_size: int | None = None
    """Size of the product for strong scaling; by default 16384 on GPUs, 1536 on CPUs."""
    weak_size: int | None = None
    """Size of one rank's product for weak scaling; by default 8192 on GPUs, 1024 on CPUs."""
    distributed_samples: int = 5
    """Samples of each distributed product, after one that is thrown away."""

    @property
    def longest_wait_s(self) -> float:
        """For which ranks wait in a collective for one that samples."""
        return self.time_budget_s


def matmul_cases(config: MatmulConfig, n_ranks: int) -> list[MatmulConfig]:
    """One run; checks the flags.

    Raises:
        ConfigError: a size, dtype or count that makes no sense.
    """
    for dtype in (*config.dtype, config.distributed_dtype):
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}: choose one")
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
    by_default = (
        (1024, 2048, 4096, 8192, 16384) if world.device.type == "cuda" else (256, 512, 1024)
    )
    return list(config.sizes or by_default)


def _dtypes(config: MatmulConfig, world: World) -> list[str]:
    """Those asked for, and the distributed product's, whose local speed sets the blocks."""
    if config.dtype:
        asked = list(config.dtype)
    else:
        asked = [dtype for dtype in DTYPES if not unsupported_reason(dtype, world.device)]
    wanted = [] if config.scaling == "none" else [config.distributed_dtype]
    return list(dict.fromkeys([*asked, *wanted]))


def _measure_alone(
    config: MatmulConfig, context: Context
) -> tuple[dict[str, float], list[Unmeasured], dict[str, float]]:
    budget = Budget(time_s=config.time_budget_s, n_min=config.min_samples)
    sizes, dtypes = _sizes(config, context.world), _dtypes(config, context.world)
    best, skipped = measure_products(sizes, dtypes, context, budget)
    return best, skipped, measure_memory(context, budget)


def _points(config: MatmulConfig, world: World, has_gpus: bool) -> list[Point]:
    counts = rank_counts(world.size)
    strong = config.strong_size or (16384 if has_gpus else max(1536, 8 * world.size))
    weak = config.weak_size or (8192 if has_gpus else 1024)
    points: list[Point] = []
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
        ConfigError: a device was not measured in it, on every rank.
    """
    world = context.world
    speeds = gather_numbers(best.get(dtype, 0.0), world)
    mine = [f"size {row.size}: {row.reason}" for row in skipped if row.dtype == dtype]
    reasons = gather_bytes("".join(mine[:1]).encode(), world)  # that of the smallest size
    slow = [rank for rank, speed in enumerate(speeds) if speed <= 0]
    if slow:
        raise ConfigError(
            f"rank {slow[0]} ({world.hostnames[slow[0]]}) cannot multiply in {dtype}, which the "
            f"distributed product needs ({reasons[slow[0]].decode()}): choose smaller --sizes, "
            "another --distributed-dtype or --scaling none"
        )
    return speeds


def _measure_together(
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
    """Measure each device alone, then one product on 1, 2, ... all ranks.

    Raises:
        VerificationError: a product is wrong or faster than the device can be.
        ConfigError: a device cannot take part in the distributed product.
    """
    world = context.world
    for turn in range(world.size if config.in_turn else 1):
        if not config.in_turn or turn == world.rank:
            best, skipped, memory = _measure_alone(config, context)
        wait_for_all(world)
    rows = [] if config.scaling == "none" else _measure_together(config, context, best, skipped)
    for kind, n_bytes in peak_bytes(world.device).items():
        context.recorder.sample("memory_peak_bytes", n_bytes, kind=kind)
    return {
        "flops_per_s": best,
        "memory_copy_bytes_per_s": memory["memory_copy_s"],
        "memory_triad_bytes_per_s": memory["memory_triad_s"],
        "skipped": [f"size {row.size}: {row.reason}" for row in skipped],
        "distributed": rows,
    }


WORKLOAD = Workload(
    renamed={"--dtypes": "--dtype", "--repeats": "--distributed-samples"},
    config=MatmulConfig,
    cases=matmul_cases,
    body=run_matmul,
    table=matmul_text,
)

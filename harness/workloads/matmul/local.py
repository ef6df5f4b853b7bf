"""Measure one device: matrix products over sizes and dtypes, verified, and memory bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

import torch

from harness.errors import VerificationError
from harness.measure.derive.devices import MEMORY_KERNELS
from harness.measure.recorder import Clock
from harness.runtime.devices.memory import CacheFlush, last_cache_bytes
from harness.runtime.devices.peaks import highest_clock, peak_flops_per_s
from harness.runtime.devices.precision import lack_of
from harness.runtime.devices.sampling import (
    Budget,
    count_within,
    hold_gpu,
    shortest_sample_s,
    take_samples,
)
from harness.runtime.ranks.world import Context, World
from harness.units import format_bytes, format_flops
from harness.workloads.matmul.product import SEED_A, SEED_B, TORCH_DTYPES, block, check_block

# Memory beside the operands: strips of the check, and the caching allocator.
_SPARE_BYTES = 1 << 29
# A GPU may briefly exceed its published boost clock; timing only the launch is wrong by far more.
_BOOST = 1.2


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A size and dtype that was not measured, with the reason."""

    size: int
    dtype: str
    reason: str


def unsupported_reason(dtype: str, device: torch.device) -> str:
    """Why a device has no hardware for products in a dtype; empty if it has."""
    if device.type != "cpu":
        return lack_of(dtype, device)
    if dtype == "tf32":
        return "is a format of NVIDIA tensor cores"
    operations = torch.ops.mkldnn
    try:
        if dtype == "bf16" and not operations._is_mkldnn_bf16_supported():
            return "has no instructions on this CPU (AVX512 or AMX)"
        if dtype == "fp16" and not operations._is_mkldnn_fp16_supported():
            return "has no instructions on this CPU (AVX512-FP16 or AMX-FP16)"
    except AttributeError:  # a torch without oneDNN, such as on ARM
        return "" if dtype == "fp32" else "has no kernel in this torch build"
    return ""


def oversize_reason(size: int, dtype: str, world: World) -> str:
    """Why a product does not fit into the device's memory; empty if it fits."""
    operands = 3 * size * size * TORCH_DTYPES[dtype].itemsize
    needed = operands + last_cache_bytes(world.device) + _SPARE_BYTES
    if needed <= world.memory_bytes:
        return ""
    return f"needs {format_bytes(needed)}, the device has {format_bytes(world.memory_bytes)}"


@contextmanager
def precision_of(dtype: str) -> Iterator[None]:
    """Context in which fp32 products use tf32 if `dtype` is tf32, else full precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class _Operands:
    """Tensors of one product C = A B."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor

    @classmethod
    def make(cls, size: int, dtype: str, device: torch.device) -> _Operands:
        stored = TORCH_DTYPES[dtype]
        a, b = (block(s, (0, size), (0, size), device).to(stored) for s in (SEED_A, SEED_B))
        return cls(a, b, torch.empty_like(a))

    def copy(self) -> _Operands:
        return _Operands(self.a.clone(), self.b.clone(), self.c.clone())

    def multiply(self) -> None:
        torch.mm(self.a, self.b, out=self.c)

    @property
    def n_bytes(self) -> int:
        return 3 * self.a.nbytes


def _spread_over_cache(first: _Operands, n_products: int, flush: CacheFlush) -> list[_Operands]:
    """Make so many copies that consecutive products never find their operands in the cache."""
    n_sets = min(n_products, math.ceil(flush.n_bytes / first.n_bytes) + 1)
    return [first, *(first.copy() for _ in range(n_sets - 1))]


def time_product(
    size: int, dtype: str, device: torch.device, clock: Clock, budget: Budget
) -> tuple[list[float], _Operands]:
    """Time samples of one product with a cold cache; returns their seconds and the operands.

    A sample is one product. Under a CPU quota, it is the mean over as many products, each with its
    own operands, as span several periods of the quota.
    """
    flush, operands = CacheFlush(device), _Operands.make(size, dtype, device)
    n_products = count_within(operands.multiply, clock, shortest_sample_s(device.type))
    turns = cycle(_spread_over_cache(operands, n_products, flush))

    def sample() -> tuple[Any, Any]:
        if device.type == "cuda":  # else a short flush ends before the product is queued
            hold_gpu()
        flush()
        start = clock.mark()
        for _ in range(n_products):
            next(turns).multiply()
        return start, clock.mark()

    durations = take_samples(sample, clock, budget)
    return [duration_s / n_products for duration_s in durations], operands


def check_peak(flops: float, durations: list[float], dtype: str, device_kind: str) -> None:
    """Refuse a rate that the device cannot reach.

    Raises:
        VerificationError: the median is above the published peak at the device's highest clock, or
            one sample is far above it.
    """
    peak = peak_flops_per_s(device_kind).get(dtype)
    if peak is None:
        return
    ceiling = highest_clock(device_kind) * peak
    for duration_s, limit in ((median(durations), ceiling), (min(durations), _BOOST * ceiling)):
        if flops / duration_s > limit:
            raise VerificationError(
                f"{dtype} at {format_flops(flops / duration_s)} is above the "
                f"{format_flops(ceiling)} that {device_kind} can do: the clock or the product is "
                "wrong"
            )


def measure_product(size: int, dtype: str, context: Context, budget: Budget) -> float:
    """Time, verify and record one product; returns its FLOP/s from the median time.

    Raises:
        VerificationError: the result is wrong, or the rate is above the device's peak.
    """
    with precision_of(dtype):
        clock, device = context.recorder.clock, context.world.device
        durations, operands = time_product(size, dtype, device, clock, budget)
        check = check_block(operands.c, (0, size), (0, size), size, dtype)
    check.require(f"the {dtype} product of size {size} on {context.world.hostname}")
    check_peak(2.0 * size**3, durations, dtype, context.world.device_kind)
    sample = context.recorder.sample
    for step, duration_s in enumerate(durations):
        sample("matmul_s", duration_s, step=step, m=size, n=size, k=size, dtype=dtype)
    sample("matmul_error", check.error, m=size, n=size, k=size, dtype=dtype,
           tolerance=check.tolerance)  # fmt: skip
    context.flush()
    return 2.0 * size**3 / median(durations)


def measure_products(
    sizes: list[int], dtypes: list[str], context: Context, budget: Budget
) -> tuple[dict[str, float], list[Unmeasured]]:
    """Measure every size and dtype on this rank's device.

    Returns:
        The best FLOP/s by dtype, and the sizes and dtypes that were not measured.
    """
    device = context.world.device
    best: dict[str, float] = {}
    skipped: list[Unmeasured] = []
    rows = [(dtype, size) for dtype in dtypes for size in sorted(set(sizes))]
    for done, (dtype, size) in enumerate(rows):
        context.progress.update("matmul on each device", done, len(rows), f"{dtype} {size}")
        reason = unsupported_reason(dtype, device) or oversize_reason(size, dtype, context.world)
        if reason:
            skipped.append(Unmeasured(size=size, dtype=dtype, reason=f"{dtype} {reason}"))
            context.recorder.sample(
                "matmul_skipped", 1, m=size, n=size, k=size, dtype=dtype, reason=f"{dtype} {reason}"
            )
            continue
        rate = measure_product(size, dtype, context, budget)
        best[dtype] = max(best.get(dtype, 0.0), rate)
    context.progress.update("matmul on each device", len(rows), len(rows))
    return best, skipped


def measure_memory(context: Context, budget: Budget) -> dict[str, float]:
    """Record and return the bytes/s of a copy and of STREAM's triad a = b + s c.

    Source: McCalpin, STREAM: arrays have at least four times the size of the last cache; a copy
    counts 2 arrays of traffic, a triad 3 (write-allocate on a CPU is not counted).
    """
    device, clock = context.world.device, context.recorder.clock
    n_bytes = max(1 << 26, 4 * last_cache_bytes(device))
    a = torch.zeros(n_bytes // 4, device=device)
    b, c = torch.ones_like(a), torch.ones_like(a)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: a.copy_(b),
        "triad": lambda: torch.add(b, c, alpha=3.0, out=a),
    }
    rates: dict[str, float] = {}
    for kernel, (metric, n_arrays) in MEMORY_KERNELS.items():
        durations = _time_pass(works[kernel], context, budget)
        clock.settle()
        for step, duration_s in enumerate(durations):
            context.recorder.sample(metric, duration_s, step=step, n_bytes=n_bytes)
        rates[metric] = n_arrays * n_bytes / median(durations)
    if not bool((a == 4.0).all()):
        raise VerificationError(
            f"the triad on {context.world.hostname} wrote {a.min().item()} to {a.max().item()} "
            "instead of 4: check the device's memory (ECC)"
        )
    context.flush()
    return rates


def _time_pass(work: Callable[[], object], context: Context, budget: Budget) -> list[float]:
    """Time passes over the arrays; under a CPU quota, a sample is the mean of several passes."""
    clock = context.recorder.clock
    n_passes = count_within(work, clock, shortest_sample_s(context.world.device.type))

    def sample() -> tuple[Any, Any]:
        start = clock.mark()
        for _ in range(n_passes):
            work()
        return start, clock.mark()

    return [duration_s / n_passes for duration_s in take_samples(sample, clock, budget)]

"""Compare the matmul workload's time of a product with a plain timed loop of torch.matmul.

Both are measured in turn, at the same size and dtype (by default bf16 8192 on a GPU, fp32 1024 on a
CPU); the ratio is the workload's median time over the plain loop's. The plain loop runs hot. If the
operands fit in the last-level cache, which the workload flushes before each product, the plain loop
flushes it too, because the two would otherwise differ by design.

    .venv/bin/python benchmarks/matmul_vs_plain.py --size 4096 --json
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import tyro
from comparison import compare, show

from harness.runtime.devices.memory import last_cache_bytes
from harness.runtime.devices.sampling import Budget, clock_for
from harness.units import format_flops
from harness.workloads.matmul.local import precision_of, time_product
from harness.workloads.matmul.product import TORCH_DTYPES


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int = 0
    """Rows of the square matrices; 0 means 8192 on a GPU, 1024 on a CPU."""
    dtype: str = ""
    """fp32, tf32, bf16 or fp16; empty means bf16 on a GPU, fp32 on a CPU."""
    pairs: int = 11
    """Number of measurements of each."""
    samples: int = 20
    """Products per measurement."""
    json: bool = False
    """Print one JSON object."""


def plain_time(size: int, dtype: str, device: torch.device, n: int, is_cold: bool) -> float:
    """Median seconds of torch.matmul in a hand-written loop."""
    a = torch.randn(size, size, device=device, dtype=TORCH_DTYPES[dtype])
    b = torch.randn(size, size, device=device, dtype=TORCH_DTYPES[dtype])
    cache = torch.empty(last_cache_bytes(device), dtype=torch.uint8, device=device)
    for _ in range(3):
        torch.matmul(a, b)
    times = []
    for _ in range(n):
        if is_cold:
            cache.zero_()
        if device.type == "cuda":
            times.append(_event_time(a, b))
        else:
            start_ns = time.perf_counter_ns()
            torch.matmul(a, b)
            times.append((time.perf_counter_ns() - start_ns) * 1e-9)
    return median(times)


def _event_time(a: torch.Tensor, b: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.matmul(a, b)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def harness_time(size: int, dtype: str, device: torch.device, n: int) -> float:
    """Median seconds of the same product by the workload's code."""
    budget = Budget(time_s=1e-9, n_min=n, n_warm_up=3)
    durations, _ = time_product(size, dtype, device, clock_for(device), budget)
    return median(durations)


def main(options: Options) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = options.size or (8192 if device.type == "cuda" else 1024)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    is_cold = 3 * size * size * TORCH_DTYPES[dtype].itemsize <= last_cache_bytes(device)
    ours: list[float] = []
    plain: list[float] = []
    with precision_of(dtype):
        for pair in range(options.pairs):
            # They alternate in going first, so that a drift of clocks favours neither.
            for is_ours in (True, False) if pair % 2 == 0 else (False, True):
                if is_ours:
                    ours.append(harness_time(size, dtype, device, options.samples))
                else:
                    plain.append(plain_time(size, dtype, device, options.samples, is_cold))
    if not options.json:
        rates = [format_flops(2.0 * size**3 / median(times)) for times in (ours, plain)]
        print(f"workload {rates[0]}, plain loop {rates[1]}{', cold cache' if is_cold else ''}")
    name = f"matmul {dtype} {size}: workload / plain torch.matmul loop, time"
    show([compare(name, ours, plain)], as_json=options.json)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""One product distributed over 1, 2, ... all ranks: strong and weak scaling of SUMMA."""

from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, Literal

import torch.distributed as dist

from harness.domain.record import Span
from harness.errors import ConfigError
from harness.measure.derive.spans import covered_s
from harness.measure.recorder import Clock, HostClock
from harness.runtime.ranks.gather import barrier, gather_numbers, raise_on_all_ranks
from harness.runtime.ranks.world import Context, World
from harness.units import format_bytes
from harness.workloads.matmul.local import precision_of
from harness.workloads.matmul.product import TORCH_DTYPES, check_block
from harness.workloads.matmul.summa import Marks, Summa, split_square

Scaling = Literal["strong", "weak"]

# Memory for operands, product, panels in flight and the check's strips, in units of one matrix.
_MATRICES_HELD = 4
_N_PANELS = 16


@dataclass(frozen=True, kw_only=True)
class DistributedProduct:
    scaling: Scaling
    n_ranks: int
    size: int

    @property
    def flops(self) -> float:
        return 2.0 * self.size**3


def rank_counts(size: int) -> list[int]:
    """Numbers of ranks to measure: every number up to 8, then powers of two, and all."""
    powers = [2**i for i in range(4, size.bit_length())]
    return sorted({*range(1, min(size, 8) + 1), *(p for p in powers if p < size), size})


def points_of(scaling: Scaling, size: int, counts: list[int]) -> list[DistributedProduct]:
    """Make the products: strong keeps the size, weak keeps the FLOPs per rank."""
    sizes = [size if scaling == "strong" else 2 * round(size * n ** (1 / 3) / 2) for n in counts]
    return [
        DistributedProduct(scaling=scaling, n_ranks=n, size=s)
        for n, s in zip(counts, sizes, strict=True)
    ]


def check_memory(points: list[DistributedProduct], dtype: str, world: World) -> None:
    """Refuse products that do not fit on the smallest device; all ranks must call it."""
    smallest = min(gather_numbers(world.memory_bytes, world))
    for point in points:
        held = _MATRICES_HELD * point.size**2 * TORCH_DTYPES[dtype].itemsize / point.n_ranks
        if held > smallest:
            raise ConfigError(
                f"a distributed product of size {point.size} on {point.n_ranks} rank(s) needs "
                f"{format_bytes(held)} each, the smallest device has {format_bytes(smallest)}: "
                "lower --strong-size or --weak-size"
            )


def measure_point(
    point: DistributedProduct, dtype: str, speeds: list[float], context: Context, n_repeats: int
) -> dict[str, Any]:
    """Time, verify and record one distributed product; all ranks must call it.

    Ranks beyond `point.n_ranks` wait without computing.

    Returns:
        The row for the summary: median seconds of the slowest rank, and rate.

    Raises:
        VerificationError: a block is wrong; raised on every rank.
    """
    world = context.world
    timeout = timedelta(seconds=context.collective_timeout_s)  # else torch's, of up to half an hour
    group = dist.new_group(list(range(point.n_ranks)), timeout=timeout)
    speeds = speeds[: point.n_ranks]
    is_member = world.rank < point.n_ranks
    part = _RankPart(point, dtype, speeds, context, group) if is_member else None
    times: list[float] = []
    with precision_of(dtype):
        for repeat in range(-1, n_repeats):
            barrier()
            duration_s = part.multiply(repeat) if part else 0.0
            if repeat >= 0:
                times.append(max(gather_numbers(duration_s, world)))
    raise_on_all_ranks(part.check if part else lambda: None, world)
    dist.destroy_process_group(group)  # a communicator of NCCL's holds memory of the GPU
    context.flush()
    return {
        "scaling": point.scaling,
        "n_ranks": point.n_ranks,
        "size": point.size,
        "dtype": dtype,
        "time_s": median(times),
        "flops_per_s": point.flops / median(times),
    }


class _RankPart:
    """This rank's part of one distributed product."""

    def __init__(
        self,
        point: DistributedProduct,
        dtype: str,
        speeds: list[float],
        context: Context,
        group: Any,
    ) -> None:
        world = context.world
        self._point, self._dtype, self._context = point, dtype, context
        # gloo's transfers of GPU data run on the host, so only its clock can time them.
        is_staged = world.device.type == "cuda" and world.backend != "nccl"
        self._clock: Clock = HostClock() if is_staged else context.recorder.clock
        self._summa = Summa(
            split_square(speeds, point.size),
            rank=world.rank,
            size=point.size,
            panel_width=max(32, -(-point.size // _N_PANELS)),
            dtype=TORCH_DTYPES[dtype],
            device=world.device,
            group=group,
            clock=self._clock,
        )

    def multiply(self, repeat: int) -> float:
        """Time one product and record it unless it is the warm-up (-1); returns its seconds."""
        start = self._clock.mark()
        compute, communication = self._summa.multiply()
        end = self._clock.mark()
        self._clock.settle()
        duration_s = self._clock.seconds_at(end) - self._clock.seconds_at(start)
        if repeat >= 0:
            self._record(repeat, duration_s, compute, communication)
        return duration_s

    def check(self) -> None:
        """Verify this rank's block."""
        size, n_panels = self._point.size, len(self._summa.panels)
        rows, columns = self._summa.block
        check_block(
            self._summa.c, rows, columns, size, self._dtype, n_accumulations=n_panels
        ).require(
            f"rank {self._context.world.rank}'s block of the distributed product of size {size} "
            f"over {self._point.n_ranks} ranks"
        )

    def _spans(self, kind: Literal["compute", "communication"], marks: Marks) -> list[Span]:
        point, at = self._point, self._clock.seconds_at
        name = f"summa {point.scaling} {point.n_ranks} ranks"
        return [
            Span(kind=kind, name=name, start_s=at(start), duration_s=at(end) - at(start))
            for start, end in marks
        ]

    def _record(self, repeat: int, duration_s: float, compute: Marks, communication: Marks) -> None:
        computing = self._spans("compute", compute)
        moving = self._spans("communication", communication)
        compute_s = covered_s(computing)
        numbers = {
            "summa_s": duration_s,
            "summa_compute_s": compute_s,
            "summa_communication_s": covered_s(moving),
            "summa_exposed_communication_s": covered_s([*computing, *moving]) - compute_s,
            "summa_received_bytes": float(self._summa.n_received_bytes),
        }
        size, recorder = self._point.size, self._context.recorder
        for metric, value in numbers.items():
            recorder.sample(
                metric, value, step=repeat, m=size, n=size, k=size, dtype=self._dtype,
                scaling=self._point.scaling, n_ranks=self._point.n_ranks,
            )  # fmt: skip
        for span in (*computing, *moving):
            recorder.add(span)

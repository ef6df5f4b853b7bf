"""Time collectives over sizes and transports, and verify their results."""

import time
from dataclasses import dataclass

from harness.domain.cluster import CollectivePoint
from harness.measure.statistics import summarize
from harness.runtime.devices.sampling import Budget
from harness.runtime.ranks.gather import maximum_over_ranks, raise_on_all_ranks
from harness.runtime.ranks.world import Context, World
from harness.units import format_bytes, format_duration
from harness.workloads.links.operations import CollectiveTrial, Transport, make_trial, time_trial


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the duration of a sweep over sizes.

    Attributes:
        budget: budget of each operation at each size.
        longest_s: sizes with longer iterations are left out; infinite if the user gave the sizes.
    """

    budget: Budget
    longest_s: float


def measure_collective(
    operation: str, n_bytes: int, transport: Transport, context: Context, budget: Budget
) -> CollectivePoint:
    """Time, check and record one operation at one size; all ranks must call it.

    Raises:
        VerificationError: a result is wrong on any rank; raised on every rank.
    """
    trial = make_trial(operation, n_bytes, transport)
    n = _count_iterations(trial, transport, context.world, budget)
    raise_on_all_ranks(trial.check, context.world)
    durations = time_trial(trial, transport, n)
    raise_on_all_ranks(trial.check, context.world)
    for step, duration_s in enumerate(durations):
        context.recorder.sample(
            "collective_s", duration_s, step=step,
            operation=operation, transport=transport.name, n_bytes=trial.n_bytes,
        )  # fmt: skip
    context.flush()
    slowest = maximum_over_ranks(durations, context.world)
    return CollectivePoint(
        operation=operation,
        transport=transport.name,
        n_ranks=transport.size,
        n_bytes=trial.n_bytes,
        duration_s=summarize(slowest).median,
    )


def _count_iterations(
    trial: CollectiveTrial, transport: Transport, world: World, budget: Budget
) -> int:
    """Warm up, and count the iterations that fit into the budget; equal on every rank."""
    time_trial(trial, transport, 1)  # opens connections
    start_ns = time.perf_counter_ns()
    time_trial(trial, transport, budget.n_warm_up)
    iteration_s = (time.perf_counter_ns() - start_ns) * 1e-9 / budget.n_warm_up
    return budget.count(maximum_over_ranks([iteration_s], world)[0])


def measure_collectives(
    operations: list[str],
    sizes: list[int],
    transport: Transport,
    context: Context,
    limits: Limits,
) -> tuple[list[CollectivePoint], list[str]]:
    """Measure every operation at every size; all ranks must call it.

    Returns:
        The points, equal on all ranks, and a text for each measurement that was left out.
    """
    if transport.size == 1:
        return [], [f"collectives over {transport.name}: they need at least two ranks"]
    points: list[CollectivePoint] = []
    left_out: list[str] = []
    label = f"collectives over {transport.name}"
    total = len(operations) * len(sizes)
    for at, operation in enumerate(operations):
        last: CollectivePoint | None = None
        for i, n_bytes in enumerate(sorted(sizes)):
            note = f"{operation} {format_bytes(n_bytes)}"
            context.progress.update(label, at * len(sizes) + i, total, note)
            predicted_s = last.duration_s * n_bytes / last.n_bytes if last else 0.0
            if last and n_bytes > 1 << 20 and predicted_s > limits.longest_s:
                left_out.append(
                    f"{note} over {transport.name}: about {format_duration(predicted_s)} an "
                    "iteration; --sizes measures it anyway"
                )
                continue
            last = measure_collective(operation, n_bytes, transport, context, limits.budget)
            points.append(last)
    context.progress.update(label, total, total)
    return points, left_out

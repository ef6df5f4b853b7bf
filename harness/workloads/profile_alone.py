"""The whole step while all other devices wait: what they cost a device that they share a machine
with."""

from __future__ import annotations

from collections.abc import Sequence

from harness.runtime.agreement import gather_bytes
from harness.runtime.context import Context
from harness.workloads.plan_share import wait_for_all
from harness.workloads.profile_step import StepSampler

# Fewest pairs whose median has an interval.
_N_PAIRS = 8


def alone_ratios(
    steps: StepSampler | None, kinds: Sequence[str], context: Context
) -> dict[int, list[float]]:
    """Time the step on all devices at once, then on one of each kind while the others wait, and so
    on in turn; all ranks must call it.

    Args:
        steps: None where a step needs too much memory.
        kinds: of all ranks' devices.

    Returns:
        Seconds alone over those with all at work just before, by samples; of this rank, where it is
        the first of its kind.
    """
    world, progress, found = context.world, context.progress, dict[int, list[float]]()
    wait_for_all(world)  # some kinds of device take their steps long before others
    can = [bool(part) for part in gather_bytes(b"" if steps is None else b"1", world)]
    turns = list({kinds[rank]: rank for rank in reversed(range(world.size)) if can[rank]}.values())
    for pair in range(_N_PAIRS):
        progress.update("whole step alone", pair, _N_PAIRS, "")
        wait_for_all(world)
        together = {} if steps is None else steps.take()
        for rank in turns:
            wait_for_all(world)
            if rank != world.rank or steps is None:
                continue
            for samples, alone_s in steps.time_once().items():
                ratio = alone_s / together[samples]
                found.setdefault(samples, []).append(ratio)
                context.recorder.sample("model_step_alone_ratio", ratio, step=pair, batch=samples)
    wait_for_all(world)
    return found

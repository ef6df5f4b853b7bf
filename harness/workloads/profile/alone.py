"""The whole step while all other devices wait: what they cost a device that they share a machine
with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.runtime.ranks.agreement import gather_bytes
from harness.runtime.ranks.broadcast import wait_for_all
from harness.runtime.ranks.context import Context
from harness.workloads.profile.step import StepSampler, StepTime

_N_PAIRS = 12


@dataclass(frozen=True)
class AloneRatios:
    """The step alone over the one with all at work just before, by samples, in two factors: what
    slows a process that computes, and what keeps it from that. One is noisy where the other is not.

    Attributes:
        processor: of the processor's time; nothing on GPUs.
        rest: of the time that passes for each second of the processor's; on GPUs of all time.
    """

    processor: dict[int, list[float]] = field(default_factory=dict)
    rest: dict[int, list[float]] = field(default_factory=dict)

    def add(self, samples: int, alone: StepTime, together: StepTime) -> dict[str, float]:
        """Add a pair; its factors by name."""
        ratio = alone.seconds / together.seconds
        factors = {"rest": ratio}
        if alone.processor_s and together.processor_s:
            own = alone.processor_s / together.processor_s
            self.processor.setdefault(samples, []).append(own)
            factors = {"processor": own, "rest": ratio / own}
        self.rest.setdefault(samples, []).append(factors["rest"])
        return factors


def alone_ratios(steps: StepSampler | None, kinds: Sequence[str], context: Context) -> AloneRatios:
    """Time the step on all devices at once, then on one of each kind while the others wait, and so
    on in turn; all ranks must call it.

    Args:
        steps: None where a step needs too much memory.
        kinds: of all ranks' devices.

    Returns:
        Of this rank, where it is the first of its kind.
    """
    world, progress, found = context.world, context.progress, AloneRatios()
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
            for samples, alone in steps.time_once().items():
                factors = found.add(samples, alone, together[samples])
                for name, value in factors.items():
                    context.recorder.sample(
                        "model_step_alone_ratio", value, step=pair, batch=samples, factor=name
                    )
    wait_for_all(world)
    return found

"""Reasons to change the strategy of a running training: the POLICIES table.

All policies of a run may be on together. Between two steps each is asked in turn for its next
change; the answer is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.domain.freezing import n_frozen_by_norms, n_frozen_layers
from harness.errors import ConfigError, HarnessError
from harness.inputs import read_file
from harness.runtime.ranks.gather import broadcast_result, gather_numbers
from harness.workloads.train.config import TrainCase, parse_change
from harness.workloads.train.drift import DriftPolicy
from harness.workloads.train.policy import LEAD_STEPS, Due, Policy, PolicyInputs
from harness.workloads.train.requests import UNREADABLE, Request, read_request
from harness.workloads.train.shrink import ShrinkPolicy
from harness.workloads.train.survival import SurvivalPolicy


class ScheduledPolicy(Policy):
    """`--change STEP:FILE`: strategies that are read and checked before the first step.

    Raises:
        HarnessError: on every rank, if a strategy does not fit.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        def read() -> list[Due]:
            found = []
            for text in inputs.case.change:
                step, file = parse_change(text)
                data = read_file(file, "strategy file", ConfigError)
                planned = inputs.planner.plan(data, str(file))
                found.append(Due(planned=planned, why=f"--change {text}", step=step))
            return found

        self._later: list[Due] = broadcast_result(read, list[Due], inputs.context.world)

    def next_step(self) -> int | None:
        return self._later[0].step if self._later else None

    def due(self, step: int) -> Due | None:
        next_step = self.next_step()
        is_near = next_step is not None and next_step <= step + LEAD_STEPS
        return self._later.pop(0) if is_near else None


class ControlledPolicy(Policy):
    """`--controlled`: requests of ./entry.sh control, which rank 0 finds between steps."""

    def __init__(self, inputs: PolicyInputs) -> None:
        self._context, self._planner = inputs.context, inputs.planner

    def due(self, step: int) -> Due | None:
        world = self._context.world
        found = self._read() if world.is_first else None
        if max(gather_numbers(float(found is not None), world)) == 0:
            return None
        return broadcast_result(lambda: found, Due, world)

    def _read(self) -> Due | None:
        request: Request | None = None
        try:
            request = read_request(self._context.run_dir)
            if request is None:
                return None
            planned = self._planner.plan(request.data, request.source)
        except HarnessError as error:
            found = UNREADABLE if request is None else request.id
            return Due(why="control", request=found, error=str(error))
        return Due(planned=planned, why=f"control {request.source}", request=request.id)


class FreezingPolicy(Policy):
    """`--freeze`: a prefix of the layers that grows with each interval.

    The gradient rule decides LEAD_STEPS before the end of an interval, by the steps since it did.

    Raises:
        ConfigError: the model has no layers that can be frozen.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        elastic = inputs.training.trainer.elastic
        assert elastic is not None
        self._case, self._n_layers = inputs.case, len(elastic.layers)
        self._norms = elastic.watch_gradients() if inputs.case.freeze == "gradient" else None
        self._n_frozen = 0
        self._steps = inputs.case.freeze_interval or inputs.training.plan.n_steps_per_epoch
        self._interval = 0  # the last one whose change is due
        if self._n_layers == 0:
            raise ConfigError(
                f"--freeze {inputs.case.freeze} finds no layers in {inputs.case.model}: name its "
                "blocks by numbers (layers.0, layers.1) and keep one for the head, or drop it"
            )

    def next_step(self) -> int | None:
        return (self._interval + 1) * self._steps

    def due(self, step: int) -> Due | None:
        found: Due | None = None
        while (self._interval + 1) * self._steps <= step + LEAD_STEPS and found is None:
            before = self._n_frozen
            self._interval += 1
            self._n_frozen = self._next_n_frozen()
            if self._n_frozen > before:
                at = self._interval * self._steps
                why = f"--freeze {self._case.freeze}: {self._n_frozen} of {self._n_layers} layers"
                found = Due(why=why, step=at, n_frozen=self._n_frozen)
        return found

    def _next_n_frozen(self) -> int:
        alpha = self._case.freeze_alpha
        if self._norms is None:
            return n_frozen_layers(self._n_layers, alpha, self._interval)
        return n_frozen_by_norms(alpha, self._n_frozen, self._norms.take())


class CachePolicy(Policy):
    """`--cache`: training goes on behind the frozen layers once all their outputs are kept."""

    def __init__(self, inputs: PolicyInputs) -> None:
        assert inputs.cache is not None
        self._cache, self._current, self._mode = inputs.cache, inputs.current, inputs.case.cache

    def next_step(self) -> int | None:
        n_skipped, at = self._cache.due_step(0) or (0, 0)
        return at if n_skipped > self._current.n_skipped else None

    def due(self, step: int) -> Due | None:
        n_skipped, at = self._cache.due_step(step) or (0, 0)
        if n_skipped <= self._current.n_skipped or at > step + LEAD_STEPS:
            return None
        why = f"--cache {self._mode}: {n_skipped} layers"
        return Due(why=why, step=at, n_skipped=n_skipped)


@dataclass(frozen=True)
class PolicyEntry:
    """One row of POLICIES: whether a run has switched it on, and how it is made."""

    is_on: Callable[[TrainCase], bool]
    make: Callable[[PolicyInputs], Policy]


POLICIES: dict[str, PolicyEntry] = {
    "change": PolicyEntry(lambda case: bool(case.change), ScheduledPolicy),
    "controlled": PolicyEntry(lambda case: case.controlled, ControlledPolicy),
    "freeze": PolicyEntry(lambda case: case.freeze != "none", FreezingPolicy),
    "shrink": PolicyEntry(lambda case: case.shrink != "none" and not case.replicate, ShrinkPolicy),
    "replicate": PolicyEntry(lambda case: case.replicate, ShrinkPolicy),
    "cache": PolicyEntry(lambda case: case.cache != "off", CachePolicy),
    "drift": PolicyEntry(lambda case: case.drift, DriftPolicy),
    "survive": PolicyEntry(lambda case: case.survive, SurvivalPolicy),
}

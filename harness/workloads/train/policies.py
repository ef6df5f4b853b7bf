"""Reasons to change the strategy of a running training: the POLICIES table.

All policies of a run may be on together. Between two steps each is asked in turn for its next
change; the answer is equal on all ranks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.domain.fingerprint import MadeFor
from harness.domain.freezing import (
    FreezableLayer,
    FreezingState,
    n_frozen_by_norms,
    n_frozen_layers,
)
from harness.domain.strategy import Strategy
from harness.errors import ConfigError, HarnessError
from harness.inputs import read_file
from harness.measure.derive.settings import file_name
from harness.measure.store import write_atomically
from harness.plan.again import FoundAgain, SearchAgain, search_again
from harness.runtime.ranks.gather import broadcast_result, gather_numbers
from harness.units import format_duration
from harness.workloads.planning.files import only_devices
from harness.workloads.train.config import parse_change
from harness.workloads.train.keeper import plan_without
from harness.workloads.train.next_plan import BesideSearch
from harness.workloads.train.policy import LEAD_STEPS, Due, Policy, PolicyInputs
from harness.workloads.train.replanning import DriftPolicy, ShrinkPolicy
from harness.workloads.train.requests import UNREADABLE, Request, read_request

if TYPE_CHECKING:
    from harness.runtime.executor.gradients.update import LayerNorms
    from harness.workloads.train.plan import Planned

_log = logging.getLogger(__name__)


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
                if step >= inputs.training.n_steps:
                    raise ConfigError(
                        f"--change {text} is for step {step}, the run has "
                        f"{inputs.training.n_steps}: lower it, or raise --epochs"
                    )
                data = read_file(file, "strategy file", ConfigError)
                planned = inputs.planner.plan(data, str(file))
                why = f"--change {step}:{file_name(file)}"
                found.append(Due(planned=planned, why=why, step=step))
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
        why = f"control {file_name(Path(request.source))}"
        return Due(planned=planned, why=why, request=request.id)


class FreezingPolicy(Policy):
    """`--freeze`: a prefix of the layers that grows with each interval, until `--unfreeze`.

    step   0 | interval 1 | interval 2 | rate drops | interval 1 | ...
    frozen 0              F(1)         F(2)         0            F(1)

    The gradient rule decides LEAD_STEPS before the end of an interval, by the steps since it did.

    Raises:
        ConfigError: the model has no layers that can be frozen.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        elastic, case = inputs.training.elastic, inputs.case
        assert elastic is not None
        self._case, self._training, self._n_layers = case, inputs.training, len(elastic.layers)
        if self._n_layers == 0:
            raise ConfigError(
                f"--freeze {case.freeze} finds no layers in {case.model}: name its blocks by "
                "numbers (layers.0, layers.1) and keep one for the head, or drop it"
            )
        self._steps = case.freeze_interval or inputs.training.plan.n_steps_per_epoch
        # A strategy that was planned for fewer trained layers may lack memory for all.
        self._start = inputs.start if case.shrink != "none" else None
        self._norms: LayerNorms | None = None
        self._missed: list[Due] = []
        self._begin(0)
        if self._steps >= inputs.training.n_steps:
            raise ConfigError(
                f"--freeze {case.freeze} freezes after each interval of {self._steps} steps, the "
                f"run has {inputs.training.n_steps}: lower --freeze-interval (default: an epoch), "
                "or train more steps"
            )
        planned = inputs.current.planned
        saved = self._catch_up(elastic.layers, planned) if case.first_step else None
        if case.freeze == "gradient":
            self._norms = elastic.watch_gradients(is_common=case.survive, state=saved)

    def _begin(self, step: int) -> None:
        """Train all layers from a step on."""
        self._since, self._interval, self._n_frozen = step, 0, 0
        factor, n_steps = self._case.unfreeze, self._training.n_steps
        rates = self._training.rates
        self._drop = None if factor is None else rates.first_drop(factor, step, n_steps)

    def _catch_up(self, layers: Sequence[FreezableLayer], planned: Planned) -> FreezingState | None:
        """Go on from a saved state: the layers that it does not train are frozen again, and others
        later if that had been decided on. Returns what it holds of the gradient rule."""
        first, directory = self._case.first_step, self._case.load_state
        saved: FreezingState | None = None
        trained: list[str] = []
        if self._case.freeze == "gradient" and directory is not None:
            from harness.runtime.executor.state.files import check_sharded

            metadata = check_sharded(directory)[1]
            saved, trained = metadata.freezing, metadata.trained
        if saved is None:
            while (end := self.next_step()) is not None and end <= first:
                self._pass(end)
        else:
            self._begin(saved.since)
            self._interval, self._n_frozen = saved.interval, saved.n_frozen
        at, now = self._since + self._interval * self._steps, self._n_frozen
        if at > first:
            frozen = takewhile(lambda layer: layer.parameters.isdisjoint(trained), layers)
            now = len(list(frozen))
        if self._start not in (None, planned) and 0 < self._since <= first and not now:
            # The last strategy of as many ranks may be from before the drop.
            why = f"--unfreeze: all layers before step {first}"
            self._missed.append(Due(why=why, step=first, planned=self._start, n_frozen=0))
        if now:
            layers_text = f"{now} of {self._n_layers} layers before step {first}"
            why = f"--freeze {self._case.freeze}: {layers_text}"
            self._missed.append(Due(why=why, step=first, n_frozen=now))
        if now != self._n_frozen:
            self._missed.append(self._due(at))
        return saved

    def next_step(self) -> int | None:
        end = self._since + (self._interval + 1) * self._steps
        at = end if self._drop is None else min(end, self._drop)
        return at if at < self._training.n_steps else None

    def due(self, step: int) -> Due | None:
        if self._missed:
            return self._missed.pop(0)
        while (at := self.next_step()) is not None and at <= step + LEAD_STEPS:
            before = self._n_frozen
            self._pass(at)
            if self._n_frozen != before:
                return self._due(at)
        return None

    def _pass(self, step: int) -> None:
        """Decide on the layers after the end of an interval, or after a drop of the rate."""
        norms = self._norms.take() if self._norms is not None else None
        if step == self._drop:
            self._begin(step)
        else:
            self._interval += 1
            self._n_frozen = self._next_n_frozen(norms)
        if self._norms is not None:
            self._norms.note(self._since, self._interval, self._n_frozen)

    def _due(self, step: int) -> Due:
        """The change that was decided on last."""
        if self._interval:
            why = f"--freeze {self._case.freeze}: {self._n_frozen} of {self._n_layers} layers"
            return Due(why=why, step=step, n_frozen=self._n_frozen)
        why = f"--unfreeze: the learning rate is {self._training.rates.at(step):g}"
        return Due(why=why, step=step, planned=self._start, n_frozen=0)

    def _next_n_frozen(self, norms: Sequence[float] | None) -> int:
        alpha = self._case.freeze_alpha
        if norms is None:
            return n_frozen_layers(self._n_layers, alpha, self._interval)
        return n_frozen_by_norms(alpha, self._n_frozen, norms) if any(norms) else self._n_frozen


class CachePolicy(Policy):
    """`--cache`: training goes on behind the frozen layers once all their outputs are kept."""

    def __init__(self, inputs: PolicyInputs) -> None:
        assert inputs.cache is not None
        self._cache, self._current, self._mode = inputs.cache, inputs.current, inputs.case.cache
        self._n_steps = inputs.training.n_steps

    def _next(self, step: int) -> tuple[int, int] | None:
        """The layers to skip next, and the first step without them."""
        n_skipped, at = self._cache.due_step(step) or (0, 0)
        is_new = n_skipped > self._current.n_skipped and at < self._n_steps
        return (n_skipped, at) if is_new else None

    def next_step(self) -> int | None:
        found = self._next(0)
        return None if found is None else found[1]

    def due(self, step: int) -> Due | None:
        found = self._next(step)
        if found is None or found[1] > step + LEAD_STEPS:
            return None
        n_skipped, at = found
        why = f"--cache {self._mode}: {n_skipped} layers"
        return Due(why=why, step=at, n_skipped=n_skipped)


# Seconds of a short search, enough for the well-known strategies, and of all of them; ranks that
# have no plan by then get theirs first of all beside training.
_SHORT_S, _ALL_SHORT_S = 1.0, 5.0


class SurvivalPolicy(Policy):
    """`--survive`: search plans without each rank ahead, and write them into the run.

    before the first step: a short search for each rank | beside training: a long one for each

    A rank that is lost ends its run. The launch then goes on with the other ranks by such a plan,
    so nothing is searched while they wait. Replicas that are averaged go on as they are. This
    policy never changes the strategy itself.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._inputs, world = inputs, inputs.context.world
        self._search, self._rank = BesideSearch(), 0
        inputs.searches.append(self._search)
        self._first: dict[int, Strategy] = {}
        is_planned = world.is_first and world.size > 1 and inputs.case.sync_every == 1
        self._left = deque(range(world.size) if is_planned else ())
        if self._left:
            self._plan_first()
            self._next()

    def _plan_first(self) -> None:
        """A first plan without each rank, from which its search starts."""
        start_s = time.perf_counter()
        for rank in self._left:
            if time.perf_counter() - start_s < _ALL_SHORT_S:
                request = msgspec.structs.replace(self._request(rank), seconds=_SHORT_S)
                self._write(rank, search_again(request))
        self._left = deque(sorted(self._left, key=lambda rank: rank in self._first))

    def due(self, step: int) -> Due | None:
        if self._search.is_running and (found := self._search.poll()) is not None:
            self._write(self._rank, found)
            self._next()
        return None

    def close(self) -> None:
        self._search.close()

    def _next(self) -> None:
        if not self._left:
            self._search.close()
            return
        self._rank = self._left.popleft()
        self._search.start(self._request(self._rank))

    def _request(self, lost: int) -> SearchAgain:
        request = self._inputs.planner.search_again(n_frozen=0)
        left = [rank for rank in range(request.cluster.n_devices) if rank != lost]

        def of_left(rates: float | tuple[float, ...]) -> float | tuple[float, ...]:
            return rates if isinstance(rates, float) else tuple(rates[rank] for rank in left)

        options = replace(
            request.options,
            optimizer_s_per_byte=of_left(request.options.optimizer_s_per_byte),
            stream_s_per_byte=of_left(request.options.stream_s_per_byte),
        )
        return msgspec.structs.replace(
            request,
            cluster=only_devices(request.cluster, left),
            options=options,
            start=self._first.get(lost),
        )

    def _write(self, rank: int, found: FoundAgain) -> None:
        if found.strategy is None:
            _log.warning("no plan without rank %d: %s", rank, found.error)
            return
        # Without hashes, because the devices' names depend on the ranks that are left.
        strategy = msgspec.structs.replace(found.strategy, made_for=MadeFor())
        self._first[rank] = strategy
        write_atomically(plan_without(self._inputs.context.run_dir, rank), strategy.to_json())
        _log.info(
            "plan without rank %d: %s, predicted step %s",
            rank, strategy.name, format_duration(found.step_s),
        )  # fmt: skip


# By the flag of TrainSettings that switches it on.
POLICIES: dict[str, Callable[[PolicyInputs], Policy]] = {
    "change": ScheduledPolicy,
    "controlled": ControlledPolicy,
    "freeze": FreezingPolicy,
    "shrink": ShrinkPolicy,
    "cache": CachePolicy,
    "drift": DriftPolicy,
    "survive": SurvivalPolicy,
}

"""Plan again beside training: as devices drift, `--drift`; as layers freeze, `--shrink`.

    computing of each rank -> speed of each device -> search -> change, if it pays
    freeze                                         -> search -> change, if it pays

With `--drift`, ranks compare their speeds every EXCHANGE_STEPS steps. Three conditions keep noise
from moving anything: a device's speed must differ from the planned one by --drift-threshold, its
mean must have settled, and the gain over the steps that are left must exceed twice the cost of the
change.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from harness.domain.record import Record, Span
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, StrategyError
from harness.measure.derive.spans import COMPUTE_KINDS
from harness.plan.again import FoundAgain, SearchAgain, is_worth
from harness.plan.autopipe import AutoPipe
from harness.runtime.ranks.gather import broadcast_result, gather_numbers
from harness.units import format_duration
from harness.workloads.train.next_plan import BesideSearch
from harness.workloads.train.policy import Due, Policy, PolicyInputs

_log = logging.getLogger(__name__)

EXCHANGE_STEPS = 10
# Means of successive exchanges that differ by less, relatively, have settled.
SETTLED = 0.1
# A change must gain this multiple of its cost, and this share of a step.
COST_FACTOR = 2.0
LEAST_GAIN = 0.1  # about the error of a prediction
# Weight of a new step: after ten steps of another speed, the mean is within 3 % of it.
WEIGHT = 0.3
# Steps after a change that fill caches and allocate.
N_SKIPPED = 3
# Most share of the time that is left which a search may take, and least seconds of a search.
_SEARCHED_SHARE, _LEAST_SEARCH_S = 0.05, 2.0


class DeviceSpeeds:
    """The speeds of all devices relative to those before training; equal on all ranks."""

    def __init__(self, n_ranks: int) -> None:
        self.now = [1.0] * n_ranks
        self.reset()

    def reset(self) -> None:
        """Measure a new base, because the strategy has changed; speeds stay until then."""
        self._known = self.now
        self._before: list[float] = []
        self._base: dict[int, float] = {}

    def take(self, means_s: Sequence[float]) -> bool:
        """Take each rank's mean (0: it computes nothing); returns whether any speed is known anew.

        Each rank settles by itself: noise on one must not delay the base of another.
        """
        before, self._before = self._before, list(means_s)
        settled = [
            rank
            for rank, former_s in enumerate(before)
            if math.isclose(former_s, means_s[rank], rel_tol=SETTLED)
        ]
        self.now = list(self.now)
        for rank in settled:
            mean, base = means_s[rank], self._base.setdefault(rank, means_s[rank])
            if mean and base:
                self.now[rank] = self._known[rank] * base / mean
        return bool(settled)


def largest_drift(before: Sequence[float], now: Sequence[float]) -> float:
    """The largest relative change of a speed, up or down: 1 is twice or half as fast."""
    return max(math.exp(abs(math.log(b / a))) - 1 for a, b in zip(before, now, strict=True))


class DriftPolicy(Policy):
    """Compares speeds on all ranks; rank 0 searches and judges."""

    def __init__(self, inputs: PolicyInputs) -> None:
        self._inputs, self._context = inputs, inputs.context
        self._world = self._context.world
        self._times, self._speeds = MeanComputeTime(), DeviceSpeeds(self._world.size)
        self._planned_for = self._speeds.now  # of the last search
        self._trained = self._searched_for = inputs.current.trained
        self._search, self._is_searching = BesideSearch(), False
        if self._world.is_first:
            self._search.warm_up()
        self._context.recorder.listen = self._times.take

    def due(self, step: int) -> Due | None:
        if step % EXCHANGE_STEPS:
            return None
        if self._inputs.current.trained != self._trained:
            self._trained = self._inputs.current.trained
            self._times.reset()
            self._speeds.reset()
            return None
        if self._is_searching:
            return self._answer(step)
        is_disturbed = any(search.is_running for search in self._inputs.searches)
        mean_s = math.inf if is_disturbed else self._times.mean_s or 0.0
        means_s = gather_numbers(mean_s, self._world)
        if math.inf in means_s:  # by another policy's search, on rank 0
            self._times.reset()
            return None
        if self._speeds.take(means_s):
            drift = largest_drift(self._planned_for, self._speeds.now)
            if drift > self._inputs.case.drift_threshold:
                self._begin()
        return None

    def close(self) -> None:
        self._search.close()

    def _begin(self) -> None:
        """Search for the speeds of now; the search disturbs rank 0, so no times are taken."""
        self._planned_for, self._searched_for = self._speeds.now, self._inputs.current.trained
        self._is_searching = self._times.is_paused = True
        if not self._world.is_first:
            return
        for rank, speed in enumerate(self._speeds.now):
            self._context.recorder.sample("drift_speed", speed, rank=rank)
        planner, current = self._inputs.planner, self._inputs.current
        planner.set_speeds(self._speeds.now)
        self._search.start(
            planner.search_again(current.n_frozen, current.planned.strategy, current.n_skipped)
        )
        _log.info("speeds have drifted to %s: searching again", self._text())

    def _text(self) -> str:
        return ", ".join(f"{speed:.2f}" for speed in self._speeds.now)

    def _answer(self, step: int) -> Due | None:
        found = self._search.poll() if self._world.is_first else None
        if max(gather_numbers(float(found is not None), self._world)) == 0:
            return None
        self._is_searching = self._times.is_paused = False
        if self._searched_for != self._inputs.current.trained:  # layers have frozen meanwhile
            self._begin()
            return None
        return broadcast_result(lambda: self._judge(found, step), Due | None, self._world)

    def _judge(self, found: FoundAgain | None, step: int) -> Due | None:
        """The change to the strategy that was found, if it is worth its cost."""
        assert found is not None, "rank 0 has polled it"
        if found.strategy is None or found.start_step_s is None:
            _log.warning("the strategy stays, because nothing was found: %s", found.error)
            return None
        planner, current = self._inputs.planner, self._inputs.current
        n_left, n_frozen = self._inputs.training.n_steps - step, current.n_frozen
        stay_s, next_s = found.start_step_s, found.step_s
        cost_s = current.still_s + planner.estimate_change_s(
            current.planned.strategy, found.strategy, n_frozen, current.n_skipped
        )
        sample = self._context.recorder.sample
        for side, value in (("stay", stay_s), ("change", next_s)):
            sample("drift_step_predicted_s", value, side=side)
        sample("drift_cost_predicted_s", cost_s)
        pays = is_worth(stay_s, next_s, n_left, COST_FACTOR * cost_s)
        if not pays or next_s > (1 - LEAST_GAIN) * stay_s:
            _log.info(
                "the strategy stays: %s a step instead of %s do not pay for a change of %s in %d "
                "steps", *map(format_duration, (next_s, stay_s, cost_s)), n_left,
            )  # fmt: skip
            return None
        try:
            planned = planner.planned(found.strategy, n_frozen)
        except HarnessError as error:
            _log.warning("the strategy stays: %s", error)
            return None
        return Due(why=f"drift to speeds {self._text()}", planned=planned)


class MeanComputeTime:
    """The mean of one rank; it takes records as they become ready.

    Attributes:
        mean_s: seconds of forward, backward and optimizer in a step, without waiting; None before
            the first counted step.
        n_steps: counted steps since the last reset.
        is_paused: steps are not counted, because other work disturbs them.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.reset()

    def reset(self) -> None:
        """Begin again, because the strategy has changed."""
        self.mean_s: float | None = None
        self.n_steps = -N_SKIPPED
        self._open: defaultdict[int, float] = defaultdict(float)

    def take(self, records: Iterable[Record]) -> None:
        """Count the steps that have ended; a step's own span may come before its parts."""
        ended = []
        for record in records:
            if not isinstance(record, Span) or record.step is None:
                continue
            if record.kind in COMPUTE_KINDS:
                self._open[record.step] += record.duration_s
            elif record.kind == "step":
                ended.append(record.step)
        for step in ended:
            self._end(self._open.pop(step, 0.0))

    def _end(self, compute_s: float) -> None:
        if self.is_paused:
            return
        self.n_steps += 1
        if self.n_steps > 0:
            before_s = compute_s if self.mean_s is None else self.mean_s
            self.mean_s = before_s + WEIGHT * (compute_s - before_s)


class ShrinkPolicy(Policy):
    """Changes to the plan of the frozen model; all ranks construct it.

    Without `--replicate` no layer gets more replicas than at the start, so freed devices idle.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        case, start = inputs.case, inputs.start.strategy
        self._inputs, self._search = inputs, BesideSearch()
        inputs.searches.append(self._search)
        self._rule: AutoPipe | None = None
        if inputs.context.world.is_first and case.shrink == "search":
            self._search.warm_up()
        self._is_off = False
        if case.shrink == "pipetransformer":
            try:
                self._rule = AutoPipe(start, replicates=case.replicate)
            except StrategyError as error:
                if not case.continues:
                    raise
                self._is_off = True  # the ranks that are left have another strategy
                _log.warning("the frozen model is not planned again: %s", error)
        # Most devices that share an operator's samples, or have copies of it.
        most = max(len(set(plan.devices)) for plan in start.operators.values())
        self._most_replicas = None if case.replicate else most
        self._planned_for, self._is_waiting = (0, 0), False

    def due(self, step: int) -> Due | None:
        if self._is_off:
            return None
        world, current = self._inputs.context.world, self._inputs.current
        n_frozen, n_skipped = current.n_frozen, current.n_skipped
        is_searched = world.is_first and self._rule is None
        # Not where a strategy that cannot use the cache has ended it: a search would offer the
        # strategy from before.
        is_replaced = n_skipped > self._planned_for[1] and not self._is_waiting
        if n_frozen != self._planned_for[0] or is_replaced:
            self._planned_for, self._is_waiting = (n_frozen, n_skipped), True
            if is_searched:
                self._search.start(self._request(self._inputs.training.n_steps - step))
        if not self._is_waiting:
            return None
        found = self._search.poll() if is_searched else None
        is_done = found is not None or self._rule is not None
        if max(gather_numbers(float(is_done), world)) == 0:
            return None
        self._is_waiting = False
        return broadcast_result(lambda: self._answer(found, step), Due | None, world)

    def close(self) -> None:
        self._search.close()

    def _request(self, n_left: int) -> SearchAgain:
        planner, (now, n_frozen, n_skipped) = self._inputs.planner, self._inputs.current.trained
        request = planner.search_again(n_frozen, now, n_skipped)
        left_s = planner.step_s(now, n_frozen, n_skipped) * n_left
        most_s = max(_LEAST_SEARCH_S, _SEARCHED_SHARE * left_s)
        return msgspec.structs.replace(
            request,
            seconds=min(request.seconds or most_s, most_s),
            most_replicas=self._most_replicas,
        )

    def _answer(self, found: FoundAgain | None, step: int) -> Due | None:
        """The decision on rank 0; None if the strategy of now is as good."""
        try:
            return self._judge(self._next(found), self._inputs.training.n_steps - step)
        except HarnessError as error:
            _log.warning("the frozen model is not planned again: %s", error)
            return None

    def _next(self, found: FoundAgain | None) -> Strategy | None:
        """The strategy that the rule or the search gives."""
        if self._rule is not None:
            simulator = self._inputs.planner.simulator(self._inputs.current.n_frozen, 0)
            return self._rule.next_strategy(simulator)
        assert found is not None, "rank 0 has polled it"
        if found.strategy is None:
            raise HarnessError(found.error)
        return found.strategy

    def _judge(self, strategy: Strategy | None, n_left: int) -> Due | None:
        """The change to a strategy if it pays, for which PipeTransformer's rule does not ask."""
        planner, current = self._inputs.planner, self._inputs.current
        now, n_frozen, n_skipped = current.trained
        # Strategies of other names may train alike.
        if strategy is None or now == msgspec.structs.replace(
            strategy, name=now.name, made_for=now.made_for
        ):
            return None
        planned = planner.planned(strategy, n_frozen)
        before_s, after_s = (planner.step_s(one, n_frozen, n_skipped) for one in (now, strategy))
        cost_s = current.still_s + planner.estimate_change_s(now, strategy, n_frozen, n_skipped)
        reason = (
            f"predicted {format_duration(after_s)} instead of {format_duration(before_s)} a step, "
            f"{n_left} steps left"
        )
        if self._rule is None and not is_worth(before_s, after_s, n_left, cost_s):
            _log.info(
                "%s does not pay: %s, the change takes %s",
                strategy.name, reason, format_duration(cost_s),
            )  # fmt: skip
            return None
        return Due(planned=planned, why=f"--shrink {self._inputs.case.shrink}: {reason}")

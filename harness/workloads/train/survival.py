"""`--survive`: search plans without each rank ahead, and write them into the run.

before the first step: a short search for each rank | beside training: a long one for each

A rank that is lost ends its run. The launch then goes on with the other ranks by such a plan, so
nothing is searched while they wait.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from harness.domain.fingerprint import MadeFor
from harness.domain.strategy import Strategy
from harness.measure.store import write_atomically
from harness.plan.again import FoundAgain, SearchAgain, search_again
from harness.plan.simulate.options import SimulatorOptions
from harness.units import format_duration
from harness.workloads.planning.files import only_devices
from harness.workloads.train.keeper import plan_without
from harness.workloads.train.next_plan import BesideSearch
from harness.workloads.train.policy import Due, Policy, PolicyInputs

_log = logging.getLogger(__name__)

# Seconds of a short search, enough for the well-known strategies, and of all of them; ranks that
# have no plan by then get theirs first of all beside training.
_SHORT_S, _ALL_SHORT_S = 1.0, 5.0


class SurvivalPolicy(Policy):
    """Searches one plan after another on rank 0; it never changes the strategy itself."""

    def __init__(self, inputs: PolicyInputs) -> None:
        self._inputs, world = inputs, inputs.context.world
        self._search, self._rank = BesideSearch(), 0
        self._first: dict[int, Strategy] = {}
        self._left = deque(range(world.size) if world.is_first and world.size > 1 else ())
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
        return msgspec.structs.replace(
            request,
            cluster=only_devices(request.cluster, left),
            options=options_of(request.options, left),
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


def options_of(options: SimulatorOptions, ranks: Sequence[int]) -> SimulatorOptions:
    """The simulator's options for some of the devices."""

    def chosen(rates: float | tuple[float, ...]) -> float | tuple[float, ...]:
        return rates if isinstance(rates, float) else tuple(rates[rank] for rank in ranks)

    return replace(
        options,
        optimizer_s_per_byte=chosen(options.optimizer_s_per_byte),
        stream_s_per_byte=chosen(options.stream_s_per_byte),
    )

"""The next strategy of a running training, read, checked and predicted on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property

import msgspec

from harness.domain.fingerprint import MadeFor
from harness.domain.freezing import frozen_operators
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.errors import StrategyError
from harness.plan.again import SearchAgain
from harness.plan.change import predict_change_s
from harness.plan.formats.detect import detect, strategy_from
from harness.plan.formats.pipedream_plan import PipeDreamPlan, stages_by_modules, to_strategy
from harness.plan.simulate.simulator import Simulator
from harness.runtime.ranks.world import Context
from harness.workloads.planning.inputs import Inputs, read_inputs
from harness.workloads.train.config import TrainCase
from harness.workloads.train.moved_bytes import PairBytes, estimate_moved_bytes
from harness.workloads.train.plan import Planned, device_flops, search_config_of

# Seconds of a search beside training, while which the strategy of now goes on.
_MOST_BESIDE_S = 30.0


class NextPlanner:
    """Checks and predicts further strategies of one run; rank 0 only."""

    def __init__(self, case: TrainCase, context: Context) -> None:
        self._case, self._context = case, context
        self._simulators = cache(self._make_simulator)
        self._speeds: tuple[float, ...] = ()

    @cached_property
    def inputs(self) -> Inputs:
        """Graph, cluster and profile, as measured before training."""
        return read_inputs(search_config_of(self._case), self._context.run_dir)

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Predict from now on for devices of these speeds, relative to the measured ones."""
        self._speeds = tuple(speeds)
        self._simulators.cache_clear()

    def simulator(self, n_frozen: int, n_skipped: int = 0) -> Simulator:
        """The simulator of the model with so many frozen layers, of which some are cached."""
        return self._simulators(n_frozen, n_skipped)

    def _make_simulator(self, n_frozen: int, n_skipped: int) -> Simulator:
        inputs = self.inputs
        frozen, skipped = (frozen_operators(inputs.graph, n) for n in (n_frozen, n_skipped))
        if self._speeds:
            inputs = replace(inputs, cluster=inputs.cluster.scaled(self._speeds))
        return inputs.simulator(search_config_of(self._case), frozen, skipped)

    def search_again(
        self, n_frozen: int, start: Strategy | None = None, n_skipped: int = 0
    ) -> SearchAgain:
        """The request of a search beside training, for the devices' speeds of now."""
        simulator = self.simulator(n_frozen, n_skipped)
        config = search_config_of(self._case)
        if start is not None:  # without hashes, because the devices' speeds may differ
            start = msgspec.structs.replace(start, made_for=MadeFor())
        return SearchAgain(
            graph=simulator.graph,
            cluster=simulator.cluster,
            profile=simulator.profile,
            options=simulator.options,
            batch=config.batch_size,
            memory_bytes=config.memory_bytes,
            budget=config.search_budget,
            seconds=min(config.search_seconds, _MOST_BESIDE_S),
            seed=config.seed,
            start=start,
        )

    def plan(self, data: bytes, source: str) -> Planned:
        """Read a strategy file of any format.

        Args:
            source: its name, for errors.

        Raises:
            StrategyError, ConfigError: it is malformed, or for another model, batch or cluster.
            PlanError: it needs more memory than a device has.
        """
        graph, cluster = self.inputs.graph, self.inputs.cluster
        imported = detect(data, source=source)
        if isinstance(imported.content, PipeDreamPlan):
            stage_of = stages_by_modules(imported.content, graph)
            strategy = to_strategy(imported.content, graph, stage_of, batch=self._case.batch)
        else:
            strategy = strategy_from(imported, graph, None)
        if strategy.batch != self._case.batch:
            raise StrategyError(
                f"{source} is for a batch of {strategy.batch}, the run has {self._case.batch}: a "
                "change keeps the global batch"
            )
        check_fresh(strategy, graph, cluster)
        validate(strategy, graph, cluster)
        return self.planned(strategy)

    def planned(self, strategy: Strategy, n_frozen: int = 0) -> Planned:
        """The plan of a valid strategy of this run.

        Raises:
            PlanError: it needs more memory than a device has.
        """
        simulation = self.simulator(n_frozen).simulate(strategy)
        simulation.check_memory()
        return Planned(
            strategy=msgspec.structs.replace(strategy, made_for=self.inputs.made_for),
            predicted_step_s=simulation.step_s,
            flops=tuple(device_flops(self.inputs.graph, strategy, self._context.world.size)),
        )

    def step_s(self, strategy: Strategy, n_frozen: int, n_skipped: int = 0) -> float:
        """The predicted step of a strategy with so many frozen layers."""
        return self.simulator(n_frozen, n_skipped).simulate(strategy).step_s

    def estimate_change_s(self, before: Strategy, after: Strategy, n_frozen: int) -> float:
        """Seconds in which the slowest link moves its bytes, from the strategies alone."""
        return self.predict_change_s(estimate_moved_bytes(self.simulator(n_frozen), before, after))

    def predict_change_s(self, pair_bytes: PairBytes) -> float:
        """Seconds in which the slowest link moves its bytes."""
        return predict_change_s(self.inputs.cluster, pair_bytes)

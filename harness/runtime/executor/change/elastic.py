"""The engines of one training whose strategy changes."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

from harness.domain.freezing import freezable_layers
from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.capture.capture import capture
from harness.runtime.engines.engine import EngineOptions
from harness.runtime.engines.optimizers import STATES_PER_PARAMETER
from harness.runtime.executor.change.blueprint import Blueprint
from harness.runtime.executor.change.change import ChangeCost, change_engine
from harness.runtime.executor.change.transfer import find_all_migrations
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models.task import Task
from harness.runtime.ranks.world import World


class ElasticExecutor:
    """Builds an engine for each strategy from one captured model, and moves the state between them.

    Args:
        task, world, recorder, options, plan: as for ExecutorEngine.

    Attributes:
        engine: the engine that trains now.
        layers: the layers that can be frozen, from the model's inputs.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        recorder: Recorder,
        options: EngineOptions,
        plan: ExecutorPlan,
    ) -> None:
        self._world, self._recorder, self._options, self._plan = world, recorder, options, plan
        # A change collects the old engine: in 3 ms without all older objects, in 0.2 s with them.
        gc.freeze()
        captured = capture(task, plan.strategy.batch, "model")
        self.layers = freezable_layers(captured.graph)
        module = captured.module
        self._item_bytes = {
            name: tensor.element_size()
            for tensors in (module.named_parameters(), module.named_buffers())
            for name, tensor in tensors
        }
        self._blueprint = Blueprint(task, captured)
        self.engine = ExecutorEngine(task, world, recorder, options, plan, captured)

    def build(self, strategy: Strategy, n_frozen: int = 0) -> ExecutorEngine:
        """Build the engine of another strategy, without state; all ranks must call it.

        Over gloo a thread may call it beside training, because only this method makes groups then.

        Args:
            n_frozen: layers that get no gradient, no bucket and no optimizer state.

        Raises:
            StrategyError: the strategy does not fit the model or the ranks.
        """
        task, captured = self._blueprint.make(self.layers[:n_frozen])
        plan = replace(self._plan, strategy=strategy, is_held=True)
        return ExecutorEngine(task, self._world, self._recorder, self._options, plan, captured)

    def predict_bytes(self, engine: ExecutorEngine) -> dict[tuple[int, int], int]:
        """Bytes that a change to an engine moves, by (sender, reader)."""
        n_states = STATES_PER_PARAMETER[self._options.optimizer.variant]
        weights, state = find_all_migrations(self.engine.held_state(), engine.held_state())
        found: Counter[tuple[int, int]] = Counter()
        for one, n_tensors in [*((m, 1) for m in weights), *((m, n_states) for m in state)]:
            if one.source != one.target:
                n_bytes = one.n_elements * self._item_bytes[one.region.name]
                found[one.source, one.target] += n_bytes * n_tensors
        return {pair: n_bytes for pair, n_bytes in found.items() if n_bytes}

    def change(self, engine: ExecutorEngine) -> ChangeCost:
        """Go on with an engine that was built; all ranks must call it between steps.

        Raises:
            HarnessError: see `change_engine`; the engine stays.
        """
        cost = change_engine(self.engine, engine, self._world)
        self.engine = engine
        return cost

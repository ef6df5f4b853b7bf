"""The engines of one training whose strategy changes, and the change from one to the next.

Further engines are built from a captured model without the memory of its weights. A change has two
phases:

    old engine   | step 6 |                                   | freed
    new engine     built beside  | receives state | all agree | step 7 |

No rank leaves the old strategy before all ranks have received the new state and agree on its
fingerprints: of each message between its two ends, and of each replica between its holders. If one
does not, every rank keeps the old engine, whose state has not changed.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, fx, nn

from harness.domain.freezing import FreezableLayer, FreezingState, freezable_layers
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, StrategyError, VerificationError, first_line
from harness.measure.recorder import Recorder
from harness.runtime.capture.capture import Captured, capture
from harness.runtime.capture.meta_copy import stand_ins
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.engines.engine import EngineOptions
from harness.runtime.executor.cache.activations import Parked, Prefix, Tap
from harness.runtime.executor.cache.boundary import (
    UncachedError,
    boundary_values,
    cut,
    prefix_of,
    rest_of_strategy,
    why_not,
)
from harness.runtime.executor.change.transfer import (
    Bits,
    PairBytes,
    StateTransfer,
    Subject,
    find_all_migrations,
)
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.update import LayerNorms
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.state.weights import CHANNELS_LAST, IS_REPEATED
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import gather_objects, raise_on_all_ranks
from harness.runtime.ranks.world import World


def check_votes(votes: Sequence[Mapping[Subject, Bits]]) -> None:
    """Check that all ranks agree on the new state, by each rank's fingerprints."""
    known: dict[Subject, tuple[int, Bits]] = {}
    for rank, vote in enumerate(votes):
        for subject, bits in vote.items():
            first, seen = known.setdefault(subject, (rank, bits))
            if seen != bits:
                raise VerificationError(
                    f"ranks {first} and {rank} hold unequal state of the next strategy "
                    f"({_name_of(subject)}): training goes on by the old one"
                )


def _name_of(subject: Subject) -> str:
    first, second = subject
    if isinstance(first, WeightSlice):
        return f"{second} of {first.name}" if second else first.name
    return f"the message from rank {first} to rank {second}"


def _pack(transfer: StateTransfer) -> None:
    """Allocate the new state."""
    try:
        transfer.pack()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StrategyError(
            f"the next strategy's state does not fit beside that of the current one "
            f"({first_line(error)}): choose one that keeps less on this rank"
        ) from error


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Blueprint:
    """Keeps the structure of a task and of its graph; every tensor is one element, repeated.

    Args:
        task, captured: the model and its graph, before an engine has taken weights and hooks.
        device: of the repeated elements.
    """

    def __init__(self, task: Task, captured: Captured, device: torch.device) -> None:
        captured.module.meta[CHANNELS_LAST] = frozenset(
            name
            for name, p in captured.module.named_parameters()
            if p.dim() == 4
            and p.is_contiguous(memory_format=torch.channels_last)
            and not p.is_contiguous()
        )
        self._device = device
        self._task, self._captured = self._copied(task, captured)

    def make(self, frozen: Sequence[FreezableLayer] = ()) -> tuple[Task, Captured]:
        """A task and its graph for one engine, which allocates the slices that it keeps.

        Args:
            frozen: layers that are no longer trained; their modules are in evaluation mode.
        """
        task, captured = self._copied(self._task, self._captured)
        captured.module.meta[IS_REPEATED] = True
        for module in {name for layer in frozen for name in layer.modules}:
            captured.module.get_submodule(module).eval()
        names = captured.untrained.union(*(layer.parameters for layer in frozen))
        return task, replace(captured, untrained=names)

    def _copied(self, task: Task, captured: Captured) -> tuple[Task, Captured]:
        # Model and graph share tensors, so both are copied by one memo.
        memo = stand_ins(nn.ModuleList([task.model, captured.module]), self._repeated)
        model: nn.Module = copy.deepcopy(task.model, memo)
        module: fx.GraphModule = copy.deepcopy(captured.module, memo)
        for parameter in (*task.model.parameters(), *captured.module.parameters()):
            for name in _HOOKS:
                if hooks := getattr(parameter, name):
                    setattr(memo[id(parameter)], name, copy.copy(hooks))
        twins = dict(zip(captured.module.graph.nodes, module.graph.nodes, strict=True))
        nodes = {name: twins[node] for name, node in captured.nodes.items()}
        return replace(task, model=model), replace(captured, module=module, nodes=nodes)

    def _repeated(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and dtype with the memory of one element."""
        return torch.zeros((), dtype=tensor.dtype, device=self._device).expand(tensor.shape)


class ElasticExecutor:
    """Builds an engine for each strategy from one captured model, and moves the state between them.

    Args:
        task, world, recorder, options, plan, captured: as for ExecutorEngine.

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
        captured: Captured | None = None,
    ) -> None:
        self._world, self._recorder, self._options, self._plan = world, recorder, options, plan
        # A change collects the old engine: in 3 ms without all older objects, in 0.2 s with them.
        gc.freeze()
        captured = captured or capture(task, plan.strategy.batch, "model")
        self.layers = freezable_layers(captured.graph)
        module = captured.module
        self._item_bytes = {
            name: tensor.element_size()
            for tensors in (module.named_parameters(), module.named_buffers())
            for name, tensor in tensors
        }
        self._blueprint = Blueprint(task, captured, world.device)
        self._boundary = cache(self._find_boundary)  # by the number of frozen layers
        self.engine = ExecutorEngine(task, world, recorder, options, plan, captured)

    def build(
        self, strategy: Strategy, n_frozen: int = 0, n_skipped: int = 0, tap: Tap | None = None
    ) -> ExecutorEngine:
        """Build the engine of another strategy, without state; all ranks must call it.

        Over gloo a thread may call it beside training, because only this method makes groups then.

        Args:
            n_frozen: layers that get no gradient, no bucket and no optimizer state.
            n_skipped: those of them that are not computed, because the cache has their outputs.
            tap: records the outputs of the frozen layers.

        Raises:
            UncachedError: the strategy does not allow to skip these layers or to record them.
            StrategyError: the strategy does not fit the model or the ranks.
        """
        frozen, rest = self.layers[:n_frozen], None
        parked: dict[WeightSlice, Parked] = {}
        task, captured = self._blueprint.make(frozen)
        if n_skipped:
            rest = cut(task, captured, frozen[:n_skipped], self._world.device)
            task, captured = rest.task, rest.captured
            strategy = self._strategy_of_rest(strategy, captured)
            # All slices of the current engine; those that the next one uses are not parked.
            held, holders = self.engine.weights.held, self.engine.holders.items()
            parked = {piece: Parked(devices, held.get(piece)) for piece, devices in holders}
        if tap is not None:
            captured = replace(captured, apart=prefix_of(captured.graph, frozen))
        prefix = Prefix(n_frozen=n_frozen, n_skipped=n_skipped, rest=rest, parked=parked, tap=tap)
        plan = replace(self._plan, strategy=strategy)
        world, recorder = self._world, self._recorder
        return ExecutorEngine(task, world, recorder, self._options, plan, captured, prefix)

    def _strategy_of_rest(self, strategy: Strategy, captured: Captured) -> Strategy:
        """The strategy without the skipped layers.

        Raises:
            UncachedError: no schedule allows what is left.
        """
        rest = rest_of_strategy(strategy, captured.graph)
        try:
            replace(self._plan, strategy=rest).check(captured.graph, self._world.size)
        except StrategyError as error:
            raise UncachedError(f"without its cached layers {error}") from error
        return rest

    def watch_gradients(
        self, *, is_common: bool = False, state: FreezingState | None = None
    ) -> LayerNorms:
        """Add up the norms of each layer's gradients from now on; see LayerNorms."""
        self.engine.layer_norms = LayerNorms(
            self.layers, self._world, is_common=is_common, state=state
        )
        return self.engine.layer_norms

    def values_at(self, n_frozen: int) -> list[str]:
        """The values that the rest of the model reads of its first layers."""
        return self._boundary(n_frozen)[0]

    def why_not_cached(self, n_frozen: int) -> str:
        """The reason why the outputs of frozen layers cannot be kept; empty if they can."""
        return self._boundary(n_frozen)[1]

    def _find_boundary(self, n_frozen: int) -> tuple[list[str], str]:
        _, captured = self._blueprint.make(self.layers[:n_frozen])
        prefix = prefix_of(captured.graph, self.layers[:n_frozen])
        return boundary_values(captured, prefix), why_not(captured, prefix)

    def predict_bytes(self, engine: ExecutorEngine) -> PairBytes:
        n_states = self._options.optimizer.n_states
        weights, state = find_all_migrations(self.engine.held_state(), engine.held_state())
        pair_bytes: Counter[tuple[int, int]] = Counter()
        for migration, n_tensors in [*((m, 1) for m in weights), *((m, n_states) for m in state)]:
            if migration.source != migration.target:
                n_bytes = migration.region.n_elements * self._item_bytes[migration.region.name]
                pair_bytes[migration.source, migration.target] += n_bytes * n_tensors
        return {pair: n_bytes for pair, n_bytes in pair_bytes.items() if n_bytes}

    def change(self, engine: ExecutorEngine) -> PairBytes:
        """Move the state into an engine that was built and close the old one; all ranks must call
        it between steps.

        Returns:
            Bytes that travelled, equal on every rank.

        Raises:
            HarnessError: on every rank, if one cannot take its new state; the old engine trains on,
                and the new one is closed.
            RuntimeError: another rank died or hangs.
        """
        old, world = self.engine, self._world
        old.flush()
        try:
            transfer = StateTransfer(old.held_state(), engine.held_state(), world)
            raise_on_all_ranks(partial(_pack, transfer), world)
            transfer.exchange()
            vote = transfer.message_bits() | transfer.replica_bits()
            votes = gather_objects(world, (vote, transfer.n_bytes))
            check_votes([bits for bits, _ in votes])
        except HarnessError:
            engine.close()
            raise
        engine.take_over(old)
        newly_frozen = self.layers[old.prefix.n_frozen : engine.prefix.n_frozen]
        modules = {name for layer in newly_frozen for name in layer.modules}
        engine.held_state().gatherer.agree_on_buffers(modules)  # else ranks compute unlike outputs
        old.close()
        self.engine = engine
        vars(old).clear()  # at once, although its objects form reference cycles
        gc.collect()
        return {
            (source, target): n
            for target, (_, n_bytes) in enumerate(votes)
            for source, n in sorted(n_bytes.items())
        }

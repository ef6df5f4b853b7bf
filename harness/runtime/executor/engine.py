"""The engine that trains by any strategy: it lowers the strategy and runs its actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.errors import StrategyError
from harness.measure.recorder import Recorder
from harness.runtime.capture.capture import Captured, capture
from harness.runtime.data.batch import Batch
from harness.runtime.devices.precision import NARROW_DTYPES, Precision
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import make_optimizer
from harness.runtime.engines.phases import Phases
from harness.runtime.engines.replicas import verify_copies
from harness.runtime.engines.standstill import kept_alike, without_updates
from harness.runtime.executor.cache.activations import Prefix
from harness.runtime.executor.change.transfer import HeldState
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.gradients.averages import ReplicaAverages
from harness.runtime.executor.gradients.deferred import WeightGradients
from harness.runtime.executor.gradients.sync import make_groups, make_sync
from harness.runtime.executor.gradients.update import (
    GradientClip,
    LayerNorms,
    LossScale,
    WeightUpdate,
)
from harness.runtime.executor.lowered import LoweredStrategy, lower_strategy, prepare_model
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.program.emit import DeviceTasks
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.program.segments import make_program
from harness.runtime.executor.run.evaluation import evaluating
from harness.runtime.executor.run.feed import Feed
from harness.runtime.executor.run.flight import Stash
from harness.runtime.executor.run.priming import is_needed, muted, prime, prime_update
from harness.runtime.executor.run.runner import Runner
from harness.runtime.executor.run.timetable import Timetable
from harness.runtime.executor.sharded.gathers import WeightGathers
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.shards.loss import MetricSums
from harness.runtime.executor.shards.pointwise import RandomState
from harness.runtime.executor.state.shard import StateShard, state_shard
from harness.runtime.executor.state.state import StateGatherer
from harness.runtime.executor.state.weights import Weights, canonical_names
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.executor.transport.groups import Groups
from harness.runtime.executor.transport.moves import Moves, key_passer, norm_reducer
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import raise_on_all_ranks
from harness.runtime.ranks.world import World
from harness.runtime.tracing.trace import without_gradient_hooks


class ExecutorEngine:
    """Trains a task by a strategy; device k is rank k. All ranks must construct it.

    Args:
        task: the whole model, with equal weights on every rank, on the device or the host; the
            engine keeps this rank's slices, on the device, and frees the rest.
        captured: the model's graph, which was compared with the model (`runtime.faithfulness`);
            captured here if None. Both may come from a Blueprint, for an engine that gets its state
            by a change.
        prefix: of an engine that uses cached activations.

    Attributes:
        samples: positions in the global batch of the samples that this rank reads, in order.
        model: this rank's parameters.
        metric_sums: of evaluations.
        replica: see `Engine`.

    Raises:
        StrategyError: the strategy does not fit the model or the ranks.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        recorder: Recorder,
        options: EngineOptions,
        plan: ExecutorPlan,
        captured: Captured | None = None,
        prefix: Prefix = Prefix(),  # noqa: B008
    ) -> None:
        self._task, self._world, self.plan, self.prefix = task, world, plan, prefix
        strategy = plan.strategy
        scale = LossScale(options.dtype, world)
        self._recorder, self._phases = recorder, Phases(recorder)
        self._random, self.metric_sums = RandomState(plan.seed), MetricSums(task)
        self._captured = captured = captured or capture(task, strategy.batch, "model")
        hooks = prepare_model(task, captured, plan, world)
        self.weights = Weights(captured.module, world.device)
        self._groups = Groups(world, plan.timeout_s)

        meta = MetaModel.of(captured, task.inputs, world.device)
        names = canonical_names(task.model)
        lowered = lower_strategy(captured, meta, plan, world, options)
        self.holders, replicas, units = lowered.holders, lowered.replicas, lowered.units
        layouts = {size: forms.layout for size, forms in lowered.forms.items()}
        self._feed = Feed(captured, strategy, layouts, world.rank)
        self.samples, self.readers = self._feed.samples, self._feed.readers
        sizes = strategy.microbatch_sizes()
        self._gradients = WeightGradients(
            plan, layouts[max(sizes)], world, lambda parameter: self._sync.reached(parameter)
        )
        self._timetable = Timetable(
            strategy, world.rank, is_asynchronous=plan.is_asynchronous, split=self._gradients.split
        )
        gradient_groups = make_groups(
            self.holders, replicas, self._groups, world, options.reduce_dtype
        )
        exchanging = sorted({plan.unit.devices for plan in units})
        unit_groups = {ranks: self._groups.for_exchanges(ranks) for ranks in exchanging}
        self._channels = Channels(
            world,
            [message for of_size in lowered.messages.values() for message in of_size],
            self._groups,
            self._timetable.order,
            sums=lowered.sums,
            collectives=lowered.collectives,
        )
        made = {size: self._make_program(lowered, size, meta) for size in lowered.forms}
        programs = {size: program for size, (program, _) in made.items()}

        prefix.park(self.weights, self.holders)
        self.is_cache_read = any(map(prefix.is_read, programs.values()))
        self.weights.allocate()
        freed = [piece for unit, pieces, _ in units if unit.is_freed for piece in pieces]
        holders = self.holders.within(replicas.own)
        self.owners = Owners(holders, self.weights, replicas, world.rank, freed)
        self.model, self.replica = self.owners.module(self.weights), replicas.own
        self._averages: ReplicaAverages | None = None
        if replicas.n > 1:
            own = self.owners.own
            self._averages = ReplicaAverages(
                self.holders, replicas, own, world, recorder, options, self._groups
            )
        self._gatherer = StateGatherer(
            task.model, names, meta, self.weights, self.holders, self.owners, world,
            self._averages,
        )  # fmt: skip

        self._stash = Stash(self.weights.parameters()) if plan.is_asynchronous else None
        self._n_updates = 0  # in the last step
        self.gathers = WeightGathers(
            units,
            self.owners,
            unit_groups,
            lambda microbatch, stage: programs[sizes[microbatch]].units(stage),
            world,
            self._phases,
            is_ahead=replicas.n == 1,
            rounded=NARROW_DTYPES.get(options.dtype),
        )
        self._sync = make_sync(
            strategy, programs, self.weights, holders, self.owners, gradient_groups,
            self._gradients.buffers, world, recorder, options,
        )  # fmt: skip
        self._runner = Runner(
            strategy, made, self._channels, self._phases,
            Precision(options.dtype, world.device), self._gradients, self._random, self._stash,
            self._update_microbatch, self.gathers, prefix.tap,
        )  # fmt: skip
        own_parameters = self._gatherer.own_parameters()
        self.optimizer = make_optimizer(own_parameters, options.optimizer, world.device)
        self._prime_update = partial(prime_update, own_parameters, options.optimizer, world.device)
        most = options.optimizer.max_grad_norm
        norm_group = None
        if most is not None or replicas.n == 1:
            norm_group = replicas.own_group(self._groups)
        self.clip = GradientClip(most, world, norm_group)
        self.updating = WeightUpdate(
            self.weights, self.owners, self.optimizer, scale, hooks, self.clip, self._phases,
        )  # fmt: skip

        self.weights.release_others(captured.module)
        self.weights.release_others(task.model)  # if capture copied its weights
        self.layer_norms: LayerNorms | None = None
        self.is_priming_due = is_needed(world, is_compiled=plan.is_compiled)
        self._is_evaluation_primed = is_needed(world, is_compiled=False)

    # Building

    def _make_program(
        self, lowered: LoweredStrategy, size: int, meta: MetaModel
    ) -> tuple[Program, Moves]:
        """This rank's program for a size of microbatch."""
        tasks = DeviceTasks(
            task=self._task,
            forms=lowered.forms[size],
            meta=meta,
            device=self._world.rank,
            weights=self.weights,
            reduce_over=partial(norm_reducer, self._channels, self._phases),
            pass_over=partial(key_passer, self._channels, self._phases),
            random=self._random,
            gradients=self._gradients,
            metrics=self.metric_sums,
        )
        program = make_program(tasks)
        moves = Moves(tasks.layout, program, lowered.messages[size], self._world.rank)
        return program, moves

    # Training

    @torch.no_grad()
    def compute_forward(self, batch: Batch | None) -> Tensor:
        """Run the forward of this rank's samples of a batch, which alters no state; all ranks must
        call it. Returns this rank's part of the summed loss, divided by the strategy's batch."""
        device, runner = self._world.device, self._runner
        share = Share(n_local=len(self.samples), n_global=self.plan.strategy.batch)
        flights = self._feed.split(batch and batch.to(device), share, 1.0, is_asynchronous=False)
        actions = (action for action in self._timetable.step() if action.kind == "forward")
        with kept_alike(runner.buffers()):
            runner.run(tuple(actions), flights)
        runner.forget()
        self._finish_sends()
        return runner.loss

    def evaluate(self, batch: Batch | None) -> Tensor:
        """Run `compute_forward` in evaluation mode, by the weights that replicas agree on; adds to
        `metric_sums`."""
        agreeing = self._averages and self._averages.agreeing(self.gathers.gather_updated)
        with self._recorder.paused(), agreeing or nullcontext(), evaluating(self._runner.modules()):
            if self._is_evaluation_primed and not self.metric_sums.is_primed:
                with muted(self._channels):
                    self.compute_forward(batch)
                self.metric_sums.end_priming()
            return self.compute_forward(batch)

    @property
    def n_synchronisations(self) -> int:
        n_updates = self._n_updates if self.plan.is_asynchronous else 1
        return n_updates * self._sync.n_sums + (self._averages is not None)

    @property
    def can_be_muted(self) -> bool:
        """Whether the strategy uses several devices; equal on all ranks."""
        return len(set().union(*self.plan.strategy.stage_devices())) > 1

    def step(self, fetch: Callable[[], Batch], share: Share, *, is_muted: bool = False) -> Tensor:
        """Run one optimizer step; see `Engine.step`.

        Asynchronous training updates the weights after each microbatch, and leaves the last
        microbatches in flight until the next step or `flush`.

        Raises:
            PeerError: another rank died or hangs; NCCL ends this process instead.
            StrategyError: the global batch differs from the strategy's.
        """
        if share.n_global != self.plan.strategy.batch:
            raise StrategyError(
                f"the strategy is for batches of {self.plan.strategy.batch}, got "
                f"{share.n_global}: drop smaller batches"
            )
        if is_muted != self._channels.is_muted:
            self.flush()
        batch = self._feed.fetch(fetch, self._phases, self._world.device)
        if self.is_priming_due:
            self._prime(batch, share)
        self._channels.is_muted, self._n_updates = is_muted, 0
        if self._stash is None:
            self._sync.start_step(is_muted=is_muted)
        averages = None if is_muted else self._averages
        if averages is not None:
            averages.begin(share)
        self._run(batch, share)
        if self._stash is None:
            self._sync.finish()
            self._update()
            if averages is not None:
                averages.finish(self._phases)
            if not is_muted:
                self.gathers.gather_updated()
        self._finish_sends(math.inf if self._stash is None else self._timetable.n_finished)
        self._timetable.advance()
        self._random.step += 1
        return self._runner.loss

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        scale, step = self.updating.scale.state(), self._random.step
        with without_updates(self.optimizer, self.clip, self._runner.buffers()):
            yield
        self.updating.scale.load(scale)
        self._random.step = step

    def _run(self, batch: Batch | None, share: Share) -> None:
        is_asynchronous = self.plan.is_asynchronous
        scale = self.updating.scale.factor() * share.replica_factor
        flights = self._feed.split(batch, share, scale, is_asynchronous=is_asynchronous)
        self._runner.run(self._timetable.step(), flights, self._timetable.n_streamed)
        self._phases.end()

    def _prime(self, batch: Batch | None, share: Share) -> None:
        """Run a step without communication or update; see the module `priming`."""
        run, update = partial(self._run, batch, share), self._prime_update if self._stash else None
        with without_gradient_hooks(self._captured.module):
            prime(run, self._sync, self._runner, self._channels, self.weights, update)
        self.is_priming_due = False

    def flush(self) -> None:
        """Finish gathers of new weights, and asynchronous steps; all ranks must call it. Raises
        PeerError if another rank died or hangs."""
        self.gathers.finish_updated()
        if self._timetable.n_streamed:
            self._runner.run(self._timetable.flush(), [], self._timetable.n_streamed)
            self._finish_sends()
            self._timetable.n_streamed = 0

    def _finish_sends(self, before: float = math.inf) -> None:
        # Pending sends hold activations and their gradients, which no update changes.
        self._phases.begin("communication", name="sends", is_wait=True)
        self._channels.finish_sends(before)
        self._phases.end()

    def _update(self) -> None:
        if not self.is_priming_due:
            self.updating.run(self.layer_norms, is_muted=self._channels.is_muted)

    def _update_microbatch(self) -> None:
        """Synchronise gradients and update the weights after one microbatch, without a flush."""
        self._phases.end()
        self._sync.start_step(is_muted=self._channels.is_muted)
        self._sync.finish()
        self._update()
        self._phases.end()
        self._n_updates += 1

    # State

    def model_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        """See `Engine.model_state`; empty where it is not needed."""
        self.flush()
        return self._gatherer.model_state(is_for_first=is_for_first)

    def averaged_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        """See `Engine.averaged_state`."""
        self.flush()
        return self._gatherer.averaged_state(self.optimizer, is_for_first=is_for_first)

    def load_full_state(self, open_state: Callable[[], dict[str, Any]]) -> None:
        """Load a whole state, as `open_sharded` gives it; all ranks must call it.

        Raises:
            HarnessError: on every rank, if one cannot open (before slices change) or load it.
        """
        self.flush()
        opened: list[dict[str, Any]] = []
        raise_on_all_ranks(lambda: opened.append(open_state()), self._world)
        raise_on_all_ranks(lambda: self._gatherer.load(opened[0], self.optimizer), self._world)
        self.gathers.gather_updated()
        self._random.step = opened[0].get("step", self._random.step)
        self.updating.scale.load(opened[0].get("loss_scale"))
        if self._stash is not None:
            self._stash.updated()

    def shard(self, run: str = "") -> StateShard:
        """This rank's slices of the state, for `load_sharded`; all ranks must call it."""
        self.flush()
        parts = self._gatherer, self.optimizer, self._random.step, self._world
        scale = self.updating.scale.state()
        return state_shard(*parts, run=run, norms=self.layer_norms, loss_scale=scale)

    def held_state(self) -> HeldState:
        """This rank's part of the state, for a change of strategy."""
        parts = self.weights, self.owners, self.holders, self.optimizer, self._gatherer
        return HeldState(*parts, self._random)

    def take_over(self, old: ExecutorEngine) -> None:
        """Continue at the step of another engine, after its held state has been transferred."""
        self.owners.rebind()
        self._random.step = old._random.step
        self.updating.scale = old.updating.scale
        self._gatherer.take_unused(old._gatherer)
        self.layer_norms = old.layer_norms

    def close(self) -> None:
        """Destroy its process groups after the last step; all ranks must call it. The garbage
        collector frees its memory, because its objects form reference cycles."""
        self.gathers.finish_updated()
        self._groups.close()

    def verify(self) -> str:
        """Check that replicas are equal bit by bit, and return a digest of the weights; all ranks
        must call it. Raises VerificationError, with the ranks and the parameter."""
        self.flush()
        agreed = {} if self._averages is None else self._averages.average.whole()
        trained = self.owners.trained(self.weights).items()
        held = {(piece.name, piece.intervals): agreed.get(p, p) for piece, p in trained}
        return verify_copies(held, self._world)

"""The engine that trains any strategy: lower it, then run its actions step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.cluster import Cluster
from harness.domain.partition import cut_dim
from harness.domain.schedule import Action, rank_actions
from harness.domain.strategy import Strategy, validate
from harness.errors import ConfigError, StrategyError
from harness.measure.recorder import Recorder
from harness.runtime.capture import capture
from harness.runtime.data.batch import Batch
from harness.runtime.engine import EngineOptions, Share
from harness.runtime.executor.channels import Channels
from harness.runtime.executor.dropout import RandomState
from harness.runtime.executor.flight import Flight
from harness.runtime.executor.forms import Forms, choose_forms
from harness.runtime.executor.gradients import GradientSync
from harness.runtime.executor.layout import Layout, sample_intervals
from harness.runtime.executor.lower import Lowering
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.phases import Phases
from harness.runtime.executor.program import Program
from harness.runtime.executor.runner import Runner
from harness.runtime.executor.values import MetaModel
from harness.runtime.executor.weights import Holders, Weights
from harness.runtime.models.task import Task
from harness.runtime.optimizers import make_optimizer
from harness.runtime.precision import Precision
from harness.runtime.world import World


class ExecutorEngine:
    """Trains a task by a strategy; device k of the strategy is rank k. All ranks must make it.

    Args:
        task: the whole model, with equal weights on every rank; the engine keeps its own parts.

    Raises:
        StrategyError: it does not fit the model or the ranks.
        ConfigError: fp16, whose loss scaling is not made for parts of a model.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        recorder: Recorder,
        options: EngineOptions,
        plan: ExecutorPlan,
    ) -> None:
        if options.dtype == "fp16":
            raise ConfigError("the executor does not scale losses for fp16: use --dtype bf16")
        self._task, self._world, self.plan = task, world, plan
        self._recorder, self._phases = recorder, Phases(recorder)
        self._random = RandomState(plan.seed)
        captured = capture(task, plan.strategy.batch, "model")
        validate(plan.strategy, captured.graph, _ranks_as_cluster(world))
        self._captured = captured
        self._intervals = sample_intervals(captured.graph, plan.strategy, world.rank)
        self._starts = cut_dim(plan.strategy.batch, plan.strategy.n_microbatches)
        self._input_names = tuple(
            node.name for node in captured.module.graph.nodes if node.op == "placeholder"
        )
        self.weights = Weights(captured.module)
        self.holders = Holders(captured.module)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._programs = self._lower(MetaModel(captured, task.inputs, world.device))
        self._runner = self._make_runner(Precision(options.dtype, world.device))
        self._sync = self._make_sync(options.bucket_bytes)
        self._optimizer = make_optimizer(self.weights, options.optimizer, world.device)

    # Building

    def _lower(self, meta: MetaModel) -> dict[int, tuple[Layout, Program]]:
        strategy, world = self.plan.strategy, self._world
        forms: dict[int, Forms] = {
            size: choose_forms(self._captured, meta, self.plan, size)
            for size in sorted(set(strategy.microbatch_sizes()))
        }
        for form in forms.values():
            self.holders.merge(form.holders)
        statistics = {s for form in forms.values() for s in form.norm_groups()}
        for devices in sorted(set(self.holders.groups()) | statistics):
            self._groups[devices] = self._new_group(devices)
        self._channels = Channels(
            world, [w for form in forms.values() for w in form.layout.wants], self.plan.timeout_s
        )
        return {
            size: (
                form.layout,
                Lowering(
                    self._task, form, meta, world.rank, self.weights, self._reduce_over,
                    self._random,
                ).program(),
            )
            for size, form in forms.items()
        }  # fmt: skip

    def _new_group(self, devices: tuple[int, ...]) -> Any:
        if len(devices) == 1:
            return None
        if len(devices) == self._world.size:
            return dist.group.WORLD
        return dist.new_group(list(devices), timeout=timedelta(seconds=self.plan.timeout_s))

    def _reduce_over(self, devices: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        group = self._groups[devices]

        def reduce(x: Tensor) -> Tensor:
            if len(devices) > 1:
                name = f"batch norm over ranks {list(devices)}"
                self._phases.wait(name, lambda: dist.all_reduce(x, group=group))
            return x

        return reduce

    def _actions(self) -> list[Action]:
        strategy = self.plan.strategy
        sets = strategy.stage_devices()
        n_ranks = strategy.n_ranks()
        own = [stage for stage, devices in enumerate(sets) if self._world.rank in devices]
        if not own:
            return []
        return list(
            rank_actions(
                strategy.schedule,
                n_stages=len(sets),
                n_microbatches=strategy.n_microbatches,
                n_ranks=n_ranks,
                rank=own[0] % n_ranks,
            )
        )

    def _make_runner(self, precision: Precision) -> Runner:
        strategy = self.plan.strategy
        return Runner(
            self._programs,
            strategy.microbatch_sizes(),
            self._actions(),
            self._channels,
            self._phases,
            precision,
            [stage.recompute for stage in strategy.stages],
            {},
            self._random,
            lambda parameter: self._sync.reached(parameter),
        )

    def _make_sync(self, bucket_bytes: int) -> GradientSync:
        uses: Counter[nn.Parameter] = Counter()
        for size in self.plan.strategy.microbatch_sizes():
            for segments in self._programs[size][1].stages.values():
                for segment in segments:
                    if segment.is_differentiable:
                        uses.update(set(segment.module.parameters()))
        trained = self.weights.trainable()
        return GradientSync(
            [(parameter, self.holders.of(piece)) for piece, parameter in trained.items()],
            self._groups,
            uses,
            self._recorder,
            bucket_bytes,
        )

    # Training

    @property
    def samples(self) -> list[int]:
        """Positions within the global batch that this rank is fed in every step, in order."""
        return [at for start, stop in self._intervals for at in range(start, stop)]

    @property
    def model(self) -> nn.Module:
        """This rank's parameters."""
        return self.weights

    @property
    def n_synchronisations(self) -> int:
        return self._sync.n_buckets

    @property
    def can_skip_synchronisation(self) -> bool:
        return self._sync.n_buckets > 0

    def step(
        self, fetch: Callable[[], Batch], share: Share, *, is_synchronised: bool = True
    ) -> Tensor:
        """One optimizer step; see `Engine.step`.

        Raises:
            PeerError: another rank died or hangs.
            StrategyError: the global batch is not the strategy's.
        """
        if share.n_global != self.plan.strategy.batch:
            raise StrategyError(
                f"the strategy is for batches of {self.plan.strategy.batch}, got "
                f"{share.n_global}: drop smaller batches"
            )
        flights = self._feed(fetch)
        self._sync.start_step(is_synchronised=is_synchronised)
        self._runner.run(flights)
        self._phases.end()
        self._sync.finish()
        self._phases.begin("communication", "sends")
        self._channels.finish_sends()
        self._phases.begin("optimizer")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._phases.end()
        self._random.step += 1
        loss = self._runner.loss
        return torch.zeros((), device=self._world.device) if loss is None else loss

    def _feed(self, fetch: Callable[[], Batch]) -> list[Flight]:
        """Fetch this rank's data and deal it to the microbatches."""
        batch: Batch | None = None
        if any(start < stop for start, stop in self._intervals):
            self._phases.begin("data")
            batch = fetch()
            self._phases.begin("host_to_device", n_bytes=batch.n_bytes)
            batch = batch.to(self._world.device)
        flights: list[Flight] = []
        at = 0
        for (start, stop), (first, _) in zip(self._intervals, self._starts, strict=True):
            n = stop - start
            part = None
            if batch is not None and n:
                part = Batch(
                    tuple(x[at : at + n] for x in batch.inputs), batch.targets[at : at + n]
                )
            flights.append(Flight(part, (start - first, stop - first), self._input_names))
            at += n
        return flights


def _ranks_as_cluster(world: World) -> Cluster:
    """As many devices as ranks, to validate a strategy's device numbers against."""
    return Cluster.uniform(1, world.size, kind="rank", memory_bytes=1, inside_bytes_per_s=1.0)

"""Train in a PyTorch program of one's own by a strategy that search, a planner or an editor wrote.

with Trainer(make_model, strategy="strategy.json", optimizer=make_optimizer) as trainer:
    for batch in trainer.batches(data):
        loss = trainer.step(batch)
    print(trainer.evaluate(held_out)["loss"])
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.domain.graph import LOSS
from harness.domain.reduce_dtype import ReduceDtype
from harness.domain.strategy import Strategy, samples_per_device
from harness.errors import ConfigError, ModelError, StrategyError
from harness.measure.recorder import HostClock, Recorder
from harness.plan.formats.detect import as_strategy
from harness.runtime.capture.capture import capture
from harness.runtime.data import load_batches
from harness.runtime.data.agreement import GivenData
from harness.runtime.data.batch import Batch, BatchPlan
from harness.runtime.devices.precision import lack_of
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import (
    KnownParameters,
    OptimizerOptions,
    OuterOptions,
    check_factory,
    checked_optimizer,
)
from harness.runtime.engines.replicas import check_alike
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.run.evaluation import evaluate_held_out
from harness.runtime.executor.shards.loss import Metric
from harness.runtime.executor.state.files import open_sharded
from harness.runtime.executor.state.groups import OptimizerGroups
from harness.runtime.executor.state.plain import PlainState
from harness.runtime.executor.state.shard import replace_state
from harness.runtime.faithfulness.comparison import evaluates_alike, hold_alike
from harness.runtime.models.factory import task_of_program
from harness.runtime.models.shared_build import build_on_host
from harness.runtime.ranks.gather import (
    broadcast_result,
    gather_numbers,
    raise_on_all_ranks,
    wait_to_close,
)
from harness.runtime.ranks.world import World

Dtype = Literal["fp32", "bf16", "fp16"]
Scope = Literal["local", "global"]
Masks = Literal["local", "exact"]
NamedParameters = list[tuple[str, nn.Parameter]]
MakeModel = Callable[[], nn.Module | tuple[nn.Module, Any]]


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """This rank's samples of one global batch, and their share of it."""

    batch: Batch
    share: Share
    trainer: Trainer = field(repr=False)


class Trainer:
    """Trains a model by a strategy, whose device k is rank k; ranks beyond its devices idle.

    All ranks call the same methods in the same order, after `init_process_group`. A rank keeps its
    slices of the model, on its device, and empties the rest of it.

    Args:
        model: the whole model, with equal weights on every rank; or a function that makes it, or
            the pair (model, example), after torch was seeded: a host whose memory copies for all
            its ranks would fill then has one.
        example: inputs of two or more samples, as a factory of `--model` returns them: a dict of
            forward's arguments, or a tuple; a model of transformers needs none.
        strategy: its file, which rank 0 alone reads, or the strategy.
        optimizer: makes an optimizer of this rank's parameters, by the model's names. A strategy
            may cut a parameter: an optimizer that treats each element by itself (SGD, Adam, AdamW,
            RMSprop) trains as on one device, one that needs the whole (Muon, Adafactor, LAMB) does
            so only where it is uncut.
        dtype: bf16 and fp16 are torch's autocast; fp32 leaves the model's own dtypes.
        reduce_dtype: bf16 and int8 round fp32 gradients for their sum over ranks, to half or a
            quarter of their bytes.
        batch_norm: `global` normalises over all ranks' samples of a microbatch, `local` over each
            rank's.
        dropout: `exact` draws the same masks under every strategy of as many microbatches, `local`
            each rank's own.
        outer: averages the strategy's replicas so, which exchange no activations and train by
            themselves, as `train --sync-every` does; the state is the average.
        max_grad_norm: norm of all gradients, or a replica's, down to which larger ones are scaled;
            `math.inf` only measures it.
        ema_decay: of a moving average of each parameter; None: none is kept.
        seed: of a made model, the order of samples, and dropout; seeds torch's default generator.
        compile: compile forward and backward by torch.compile.
        timeout_s: how long a rank waits for another in a step before it raises PeerError; elsewhere
            the process group's timeout holds.
        device: the current GPU under NCCL, else the CPU.

    Attributes:
        samples: positions in the global batch of the samples that this rank reads.
        grad_norm: norm that `max_grad_norm` limits, in the last step, as a tensor; else None.

    Raises:
        LaunchError, ConfigError, ModelError, StrategyError: process group, options, model and
            strategy do not fit each other.
    """

    def __init__(
        self,
        model: nn.Module | MakeModel,
        example: Any = None,
        *,
        strategy: Strategy | Path | str,
        optimizer: Callable[[NamedParameters], Optimizer],
        dtype: Dtype = "fp32",
        reduce_dtype: ReduceDtype = "fp32",
        batch_norm: Scope = "local",
        dropout: Masks = "local",
        outer: OuterOptions | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        seed: int = 0,
        compile: bool = False,
        timeout_s: float = 300.0,
        device: torch.device | str | None = None,
    ) -> None:
        kinds = Dtype, ReduceDtype, Scope, Masks
        for given, kind in zip((dtype, reduce_dtype, batch_norm, dropout), kinds, strict=True):
            if given not in get_args(kind):
                raise ConfigError(f"{given!r} is none of {', '.join(get_args(kind))}: give one")
        check_factory(optimizer)
        if ema_decay is not None and not 0 < ema_decay < 1:
            raise ConfigError(f"ema_decay is {ema_decay}: give one between 0 and 1")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}: give one above 0")
        if outer is not None and ema_decay is not None:
            raise ConfigError("ema_decay averages one replica, outer several: give one of them")
        self._world = world = World.of_program(device)
        if lack := lack_of(dtype, world.device):
            raise ConfigError(f"dtype {dtype} {lack}: use fp32, or fp16 where all GPUs have it")
        self.strategy = broadcast_result(lambda: as_strategy(strategy), Strategy, world)
        if isinstance(model, nn.Module) or not callable(model):
            task = task_of_program(model, example)
        else:
            torch.manual_seed(seed)
            task = build_on_host(lambda: task_of_program(model(), example), world)
        check_alike(task.model, world)
        self._task, self._seed, self._is_averaging = task, seed, ema_decay is not None

        def make(named: NamedParameters) -> Optimizer:
            self._names = {p: name.removeprefix(task.prefix) for name, p in named}
            return checked_optimizer(optimizer, [(name, p) for p, name in self._names.items()])

        torch.manual_seed(seed * world.size + world.rank)  # each rank has dropout masks of its own
        # A host's clock never waits for the device, and its marks are dropped after each step.
        self._recorder = Recorder(HostClock())
        options = EngineOptions(
            dtype=dtype, reduce_dtype=reduce_dtype, is_compiled=compile, outer=outer,
            optimizer=OptimizerOptions(factory=make, max_grad_norm=max_grad_norm, ema=ema_decay),
        )  # fmt: skip
        plan = ExecutorPlan(
            strategy=self.strategy, batch_norm=batch_norm, dropout=dropout,
            is_compiled=compile, seed=seed, timeout_s=timeout_s,
        )  # fmt: skip
        captured = capture(task, self.strategy.batch, "model")
        plan.check(captured.graph, world.size)
        hold_alike(task, captured, dtype, world)
        self._is_evaluated_alike = evaluates_alike(task, captured)
        self._is_mixing = captured.graph.mixing_operator() is not None
        engine = ExecutorEngine(task, world, self._recorder, options, plan, captured)
        self._open_engine: ExecutorEngine | None = engine
        engine.weights.refuse_others(task.model, engine.owners.freed)
        self.samples: Sequence[int] = engine.samples
        self._data = GivenData(task, seed, world, engine.readers)
        counts = samples_per_device(self.strategy, LOSS)
        self._n_replica = sum(counts.get(rank, 0) for rank in engine.replica)
        self._held = self._engine.held_state()
        self._plain = PlainState(self._held.gatherer, optimizer, task.prefix)
        self.grad_norm = engine.clip.norm
        whole = {p: name.removeprefix(task.prefix) for name, p in task.model.named_parameters()}
        self._parameters = KnownParameters(whole | self._names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else other ranks may still be in a step
            self.close()

    @property
    def _engine(self) -> ExecutorEngine:
        if self._open_engine is None:
            raise ConfigError(
                "this Trainer is closed: make another, or close it after its last use"
            )
        return self._open_engine

    @property
    def optimizer(self) -> Optimizer:
        """For torch's learning rate schedulers."""
        return self._held.optimizer

    def batches(
        self, data: Any, *, epoch: int = 0, shuffle: bool = True, n_workers: int = 0
    ) -> Iterator[RankBatch]:
        """Iterate over this rank's samples of an epoch's whole batches, the same under every
        strategy; samples after the last whole one are left out.

        Args:
            data: has a length and samples by index, as `--data` takes them; a sample depends on
                its index, and on random numbers, which the epoch and the index seed.
            epoch: each has an order of its own, with `shuffle`.
            n_workers: processes that load samples; 0: this one.

        Raises:
            DataError: samples do not fit the model, are fewer than a batch, or differ in number
                between ranks.
            ConfigError: the Trainer is closed, or `epoch` is no number.
        """
        own, batch = self._data.opened("batches", data), self.strategy.batch
        samples = tuple(self._engine.samples)
        plan = BatchPlan(
            n_samples=len(own), shares=(batch,), positions=(samples,),
            is_shuffled=shuffle, seed=self._seed,
        )  # fmt: skip
        steps, device = plan.steps_of(epoch), self._world.device
        found = load_batches(
            own, plan, 0, n_workers=n_workers, device=device, first_step=steps.start
        )
        for step in steps:
            counts = own.count_targets(plan.global_indices(step, has_epochs=True))
            share = Share(
                n_local=len(samples), n_global=batch, counts=counts, n_replica=self._n_replica
            )
            yield RankBatch(batch=next(found), share=share, trainer=self)

    def step(self, batch: RankBatch) -> Tensor:
        """Run one optimizer step, without waiting for the device.

        Returns:
            This rank's part of the global batch's mean loss, detached; the ranks' sum is the mean.

        Raises:
            PeerError: another rank died or hangs; NCCL ends this process instead.
            StrategyError: the batch is none that this Trainer's `batches` yields.
            ConfigError: the Trainer is closed, or a parameter was frozen, freed or hooked.
        """
        engine = self._engine
        self._parameters.check()
        if not isinstance(batch, RankBatch) or batch.trainer is not self:
            kind = type(batch)
            given = "one of another" if kind is RankBatch else f"a {kind.__name__}"
            raise StrategyError(
                f"step takes a batch of this Trainer, got {given}: give what its batches() yields"
            )
        loss = engine.step(lambda: batch.batch, batch.share)
        self.grad_norm = engine.clip.norm
        self._recorder.discard()
        return loss

    def evaluate(
        self, data: Any, *, metrics: Mapping[str, Metric] = MappingProxyType({}), n_workers: int = 0
    ) -> dict[str, float]:
        """The mean loss over held-out data under the strategy, as `loss`, and each metric, in
        evaluation mode; waits for all ranks. Training goes on as if it had not run.

        Args:
            data: as for `batches`. All samples count; of a model that mixes samples those of whole
                batches.
            metrics: functions of the outputs that the loss reads and of the labels, of some
                samples; each returns the sum over these samples. The sum over the data is divided
                by the number of targets that count, as the loss is. Several outputs or labels are
                dicts by name.

        Raises:
            ModelError: the graph does not compute in evaluation mode what the model does, or the
                model returns nothing but its loss.
            DataError: samples do not fit the model, are too few, or differ in number between ranks.
            ConfigError: the Trainer is closed, or a metric fails.
        """
        engine = self._engine
        raise_on_all_ranks(self._check_evaluation, self._world)
        own = self._data.opened("evaluate", data)
        return evaluate_held_out(
            engine, self._task, own, metrics, self._world,
            is_mixing=self._is_mixing, n_workers=n_workers,
        )  # fmt: skip

    def _check_evaluation(self) -> None:
        if not self._is_evaluated_alike:
            raise ModelError(
                f"{self._task.model._get_name()} computes otherwise in evaluation mode than its "
                "graph without dropout and with running statistics: load state_dict() into a whole "
                "model, and evaluate that"
            )

    def mean_loss(self, loss: Tensor) -> float:
        """The mean loss of a batch, from each rank's part; waits for all ranks."""
        return sum(gather_numbers(float(loss), self._world))

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state on every rank, in host memory, by the model's own names."""
        return self._plain.own_names(self._engine.model_state())

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The same with the moving averages of the trained parameters.

        Raises:
            ConfigError: there are none.
        """
        if not self._is_averaging:
            raise ConfigError("this Trainer keeps no averages: give it an ema_decay, such as 0.999")
        return self._plain.own_names(self._engine.averaged_state())

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state on every rank, in host memory, as a plain program has it: of
        the optimizer that the factory makes of the model's `named_parameters()`.

        Raises:
            ConfigError: the optimizer's state of a cut parameter cannot be cut likewise.
        """
        return self._plain.of_optimizer(self.optimizer, self._groups())

    def load_state_dict(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> None:
        """Go on from the states of a plain program, which all ranks give: of the whole model, and
        of the optimizer as `optimizer_state_dict` gives it.

        Raises:
            ConfigError: the states are of another model, optimizer or groups.
        """
        self._load(lambda: self._plain.read(model, optimizer, self.optimizer))

    def save(self, directory: Path | str) -> None:
        """Write model, optimizer and its groups, each rank its slices, for any strategy and number
        of ranks; blocks until all have. A state that is there already stays whole until then.

        Raises:
            ConfigError: the optimizer's state of a cut parameter cannot be cut likewise, or it has
                values that no file holds.
            ResultsError: a file cannot be written.
        """
        groups = self._groups()
        run = broadcast_result(lambda: uuid.uuid4().hex, str, self._world)

        def write(staged: Path) -> None:
            self._engine.shard(run).write(staged)
            if self._world.is_first:
                groups.write(staged)

        replace_state(Path(directory), write, self._world)

    def load(self, directory: Path | str) -> None:
        """Go on from what `save`, or `./entry.sh train --save-every`, has written.

        Raises:
            ConfigError: the state is of another model, optimizer or groups.
            ResultsError: a shard is missing, or shards are of different saves.
        """
        path, world = Path(directory), self._world
        groups = broadcast_result(lambda: OptimizerGroups.read(path), OptimizerGroups | None, world)
        self._load(lambda: (groups, open_sharded(path)))

    def _groups(self) -> OptimizerGroups:
        names = self._names if self._held.owners.own else {}
        return OptimizerGroups.gathered(self.optimizer, names, self._world)

    def _load(self, open_both: Callable[[], tuple[OptimizerGroups | None, dict[str, Any]]]) -> None:
        opened: list[OptimizerGroups] = []

        def open_state() -> dict[str, Any]:
            groups, state = open_both()
            if groups is not None:
                groups.check(self.optimizer, self._names)
                opened.append(groups)
            return state

        self._engine.load_full_state(open_state)
        for groups in opened:
            groups.give(self.optimizer, self._names)

    def close(self) -> None:
        """Destroy the process groups that it has made, after the last step of all ranks; raises
        PeerError if one ended elsewhere."""
        if self._open_engine is not None:
            wait_to_close(self._world, self._held.random.step)
            self._open_engine.close()
            self._open_engine = None

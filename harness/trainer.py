"""Train in a PyTorch program of one's own by a strategy that search, a planner or an editor wrote.

trainer = Trainer(model, example, strategy="strategy.json", optimizer=make_optimizer)
for batch in trainer.batches(data):
    loss = trainer.step(batch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.domain.files import decode
from harness.domain.strategy import Strategy
from harness.errors import ConfigError, ModelError, ResultsError, StrategyError
from harness.inputs import read_file
from harness.measure.recorder import HostClock, Recorder
from harness.measure.store import write_atomically
from harness.plan.formats.detect import load_strategy_file
from harness.runtime.data import Batch, BatchPlan, load_batches
from harness.runtime.data.own import OwnData
from harness.runtime.devices.precision import lack_of
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions, checked_optimizer
from harness.runtime.engines.replicas import check_alike
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.state.files import open_sharded
from harness.runtime.executor.state.state import gather_objects
from harness.runtime.models.factory import task_of
from harness.runtime.models.task import ModelOptions, Task
from harness.runtime.ranks.gather import (
    barrier,
    broadcast_result,
    gather_numbers,
    raise_on_all_ranks,
)
from harness.runtime.ranks.world import World

Dtype = Literal["fp32", "bf16", "fp16"]
Scope = Literal["local", "global"]
Masks = Literal["local", "exact"]
NamedParameters = list[tuple[str, nn.Parameter]]

_GROUPS = "groups.json"  # beside the shards of a checkpoint
_PARAMETERS = ("params", "param_names")  # of an optimizer's group


class _SavedGroups(msgspec.Struct, frozen=True):
    """The optimizer's class, and of each parameter the values of its group, such as `lr`."""

    optimizer: str
    groups: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """This rank's samples of one global batch, and their share of it."""

    batch: Batch
    share: Share


class Trainer:
    """Trains a model by a strategy, whose device k is rank k; ranks beyond its devices idle.

    All ranks call the same methods in the same order, after `init_process_group`. A rank keeps its
    slices of the model, on its device, and empties the rest of it.

    Args:
        model: the whole model, with equal weights on every rank.
        example: inputs of two or more samples, as a factory of `--model` returns them: a dict of
            forward's arguments, or a tuple; a model of transformers needs none.
        strategy: its file, which rank 0 alone reads, or the strategy.
        optimizer: makes an optimizer of this rank's parameters, by the model's names. A strategy
            may cut a parameter: an optimizer that treats each element by itself (SGD, Adam, AdamW,
            RMSprop) trains as on one device, one that needs the whole (Muon, Adafactor, LAMB) does
            so only where it is uncut.
        dtype: bf16 and fp16 are torch's autocast; fp32 leaves the model's own dtypes.
        batch_norm: `global` normalises over all ranks' samples of a microbatch, `local` over each
            rank's.
        dropout: `exact` draws the same masks under every strategy, `local` each rank's own.
        max_grad_norm: norm of all gradients, down to which larger ones are scaled.
        seed: of the order of samples, and of dropout; seeds torch's default generator.
        compile: compile forward and backward by torch.compile.
        timeout_s: how long a rank waits for another before it raises PeerError.
        device: the current GPU under NCCL, else the CPU.

    Attributes:
        optimizer: for torch's learning rate schedulers.
        samples: positions in the global batch of the samples that this rank reads.

    Raises:
        LaunchError, ConfigError, ModelError, StrategyError: process group, options, model and
            strategy do not fit each other.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        strategy: Strategy | Path | str,
        optimizer: Callable[[NamedParameters], Optimizer],
        dtype: Dtype = "fp32",
        batch_norm: Scope = "local",
        dropout: Masks = "local",
        max_grad_norm: float | None = None,
        seed: int = 0,
        compile: bool = False,
        timeout_s: float = 300.0,
        device: torch.device | str | None = None,
    ) -> None:
        for given, known in ((dtype, Dtype), (batch_norm, Scope), (dropout, Masks)):
            if given not in get_args(known):
                raise ConfigError(f"{given!r} is none of {', '.join(get_args(known))}: give one")
        if isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer is an {type(optimizer).__name__}, and a rank holds slices of the "
                "model: give a function that makes it of the parameters that it gets"
            )
        self._world = world = World.of_program(device)
        if lack := lack_of(dtype, world.device):
            raise ConfigError(f"dtype {dtype} {lack}: use fp32, or fp16 where all GPUs have it")
        self.strategy = broadcast_result(lambda: _read_strategy(strategy), Strategy, world)
        task = _task_of(model, example)
        check_alike(task.model, world)
        self._task, self._seed = task, seed
        self._data: tuple[Any, OwnData] | None = None

        def make(named: NamedParameters) -> Optimizer:
            self._names = {p: name.removeprefix(task.prefix) for name, p in named}
            own = [(name, parameter) for parameter, name in self._names.items()]
            return checked_optimizer(optimizer(own), own)

        torch.manual_seed(seed * world.size + world.rank)  # each rank has dropout masks of its own
        # A host's clock never waits for the device, and its marks are dropped after each step.
        self._recorder = Recorder(HostClock())
        options = EngineOptions(
            dtype=dtype,
            optimizer=OptimizerOptions(factory=make, max_grad_norm=max_grad_norm),
            is_compiled=compile,
        )
        plan = ExecutorPlan(
            strategy=self.strategy, batch_norm=batch_norm, dropout=dropout,
            is_compiled=compile, seed=seed, timeout_s=timeout_s,
        )  # fmt: skip
        self._engine = ExecutorEngine(task, world, self._recorder, options, plan)
        self.samples: Sequence[int] = self._engine.samples
        self._held = self._engine.held_state()
        self.optimizer = self._held.optimizer

    def batches(
        self, data: Any, *, epoch: int = 0, shuffle: bool = True, n_workers: int = 0
    ) -> Iterator[RankBatch]:
        """Iterate over this rank's samples of an epoch's whole batches, the same under every
        strategy; samples after the last whole one are left out.

        Args:
            data: has a length and samples by index, as `--data` takes them; a sample depends on
                its index only.
            epoch: each has an order of its own, with `shuffle`.
            n_workers: processes that load samples; 0: this one.

        Raises:
            DataError: samples do not fit the model, or are fewer than a batch.
        """
        if self._data is None or self._data[0] is not data:
            self._data = data, OwnData("the data", data, self._task)
        own = self._data[1]
        plan = BatchPlan(
            n_samples=len(own), shares=(self.strategy.batch,), positions=(tuple(self.samples),),
            is_shuffled=shuffle, seed=self._seed,
        )  # fmt: skip
        first = epoch * plan.n_steps_per_epoch
        found = load_batches(
            own, plan, 0, n_workers=n_workers, device=self._world.device, first_step=first
        )
        for step, batch in zip(range(first, first + plan.n_steps_per_epoch), found, strict=False):
            counts = own.count_targets(plan.global_indices(step))
            share = Share(n_local=len(self.samples), n_global=plan.global_batch, counts=counts)
            yield RankBatch(batch=batch, share=share)

    def step(self, batch: RankBatch) -> Tensor:
        """Run one optimizer step, without waiting for the device.

        Returns:
            This rank's part of the global batch's mean loss, detached; the ranks' sum is the mean.

        Raises:
            PeerError: another rank died or hangs; NCCL ends this process instead.
            StrategyError: the batch is none that this Trainer's `batches` yields.
        """
        given = batch.share.n_local if isinstance(batch, RankBatch) else type(batch).__name__
        if given != len(self.samples):
            raise StrategyError(
                f"step takes this rank's {len(self.samples)} samples, got {given}: give what "
                "batches() of this Trainer yields"
            )
        loss = self._engine.step(lambda: batch.batch, batch.share)
        self._recorder.discard()
        return loss

    def mean_loss(self, loss: Tensor) -> float:
        """The mean loss of a batch, from each rank's part; waits for all ranks."""
        return sum(gather_numbers(float(loss), self._world))

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state on every rank, in host memory, by the model's own names."""
        state = self._engine.model_state()
        return {name.removeprefix(self._task.prefix): tensor for name, tensor in state.items()}

    def save(self, directory: Path | str) -> None:
        """Write model, optimizer and its groups, each rank its slices, for any strategy and number
        of ranks; blocks until all have.

        Raises:
            ConfigError: the optimizer's state of a cut parameter cannot be cut likewise.
            ResultsError: a file cannot be written.
        """
        groups: dict[str, dict[str, Any]] = {}
        for found in gather_objects(self._world, self._groups()):
            groups |= found
        saved = _SavedGroups(type(self.optimizer).__name__, groups)
        raise_on_all_ranks(lambda: self._save(Path(directory), saved), self._world)

    def load(self, directory: Path | str) -> None:
        """Go on from what `save`, or `./entry.sh train --save-every`, has written.

        Raises:
            ConfigError: the state is of another model or optimizer.
            ResultsError: a shard is missing, or shards are of different saves.
        """
        path = Path(directory) / _GROUPS
        saved = broadcast_result(lambda: _read_groups(path), _SavedGroups | None, self._world)
        raise_on_all_ranks(lambda: self._load(Path(directory), saved), self._world)

    def close(self) -> None:
        """Destroy the process groups that it has made, after the last step of all ranks."""
        barrier()
        self._engine.close()

    def _groups(self) -> dict[str, dict[str, Any]]:
        """By parameter that this rank updates, the values of its group."""
        found: dict[str, dict[str, Any]] = {}
        for group in self.optimizer.param_groups if self._held.owners.own else []:
            values = {key: _plain(v) for key, v in group.items() if key not in _PARAMETERS}
            found |= {self._names[parameter]: values for parameter in group["params"]}
        return found

    def _save(self, directory: Path, saved: _SavedGroups) -> None:
        self._engine.save_sharded(directory)
        if self._world.is_first:
            write_atomically(directory / _GROUPS, msgspec.json.encode(saved))

    def _load(self, directory: Path, saved: _SavedGroups | None) -> None:
        own = type(self.optimizer).__name__
        if saved is not None and saved.optimizer != own:
            raise ConfigError(
                f"{directory} is of the optimizer {saved.optimizer}, this one is {own}: train on "
                "by the one that saved it"
            )
        self._engine.load_full_state(open_sharded(directory))
        groups = {} if saved is None else saved.groups
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                group.update(groups.get(self._names[parameter], {}))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _read_groups(path: Path) -> _SavedGroups | None:
    if not path.exists():
        return None
    data = read_file(path, "optimizer's groups", ResultsError)
    return decode(data, _SavedGroups, source=str(path), error=ResultsError)


def _read_strategy(given: Strategy | Path | str) -> Strategy:
    return given if isinstance(given, Strategy) else load_strategy_file(Path(given))


def _task_of(model: nn.Module, example: Any) -> Task:
    if example is None and not hasattr(model, "main_input_name"):
        raise ModelError(
            f"Trainer has no example inputs of {type(model).__name__}: give a dict of forward's "
            "arguments, or a tuple, of two or more samples"
        )
    return task_of("the model", model if example is None else (model, example), ModelOptions())

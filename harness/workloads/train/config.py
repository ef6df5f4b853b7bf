"""The flags of training: of the command line, and of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.domain.schedule import ScheduleName
from harness.runtime.engines.optimizers import OptimizerOptions
from harness.workloads.common.model_flags import ModelFlags
from harness.workloads.common.search_flags import SearchFlags

EngineName = Literal["torch", "executor", "deepspeed"]

# Which strategies each engine carries out by name; the executor also takes a strategy's file.
STRATEGIES: dict[EngineName, tuple[str, ...]] = {
    "torch": ("single", "ddp"),
    "executor": ("single", "ddp", "pipeline", "tensor", "hybrid", "searched"),
    "deepspeed": ("single", "ddp", "zero1", "zero2"),
}
_ZERO_STAGES = {"zero1": 1, "zero2": 2}


def is_file(strategy: str) -> bool:
    """Whether a strategy is named by its file rather than by what it is."""
    return strategy.endswith(".json")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(SearchFlags, ModelFlags):
    """What every run of a sweep has in common."""

    data: str = "synthetic"
    """synthetic, cifar10, cifar100, imagefolder, or dlrm_hdf5 (X_int, X_cat, y)."""
    data_dir: Path = Path("data")
    """Directory of the data set (for dlrm_hdf5 the file). Nothing is ever downloaded."""
    n_samples: int | None = None
    """Size of synthetic data; by default a few global batches. If it is no multiple of the batch,
    the last batch of every epoch is smaller."""
    steps: int = 20
    """Optimizer steps that are measured."""
    epochs: int | None = None
    """Measure this many passes over the data instead of --steps."""
    warm_up: int = 3
    """Steps before those, not measured."""
    no_sync_steps: int = 5
    """Steps after those without communication: the second reading of what it costs, and what
    computing takes by itself. They do not touch what was trained and verified."""
    optimizer: str = "sgd"
    """sgd or adamw."""
    learning_rate: float = 0.01
    """Learning rate, not scaled by anything."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    balance: Literal["equal", "speed"] = "equal"
    """Shares of the ranks in a batch: equal, or in proportion to the speed at which each trains
    this model, measured first. What is trained is the same."""
    exact_dropout: bool = False
    """Draw on every shard what its part of the whole would have drawn, so that all strategies train
    the same (executor); otherwise each rank draws masks of its own, as DDP does."""
    stages: int | None = None
    """pipeline: number of stages, balanced by the profile; fewer than ranks replicates some; by
    default one for each rank (interleaved: two)."""
    recompute: bool = False
    """pipeline: keep only each stage's input, and run its forward again before its backward."""
    asynchronous: bool = False
    """pipeline or a strategy's FILE, by 1f1b: every microbatch is a minibatch of its own with an
    optimizer step, on stashed weights, as PipeDream trains: stage s of S (from 0) computes
    gradients with weights that are S - 1 - s updates old, and the pipeline never drains between
    steps. That is not what one device trains."""
    predict: bool = False
    """Measure links and operators that are not known yet, so that single and ddp are predicted
    too. Other strategies need both anyway; what is known is used in any case."""
    bucket_mib: float = 25.0
    """MiB of gradients that are reduced together. DDP's own 25 has a smaller first bucket, so that
    communication starts early; another size holds for all."""
    n_workers: int = 0
    """Processes that load data ahead; 0 loads in the training process."""
    save_model: bool = False
    """Write the trained parameters to the run's directory as model.safetensors."""
    save_sharded: bool = False
    """Each rank writes its own parts of the model's and the optimizer's state to the run's
    directory, as state/shardRANK.safetensors (executor)."""
    load_state: Path | None = None
    """Go on from the state that --save-sharded wrote into this directory, by this or another
    strategy, on as many ranks or others (executor). The data begin anew."""
    channels_last: bool = False
    """Keep images and filters in channels-last order, which tensor cores prefer."""
    seed: int = 0
    """Seed of weights, data and the order of runs."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainSettings):
    """Train a model and say where the time goes; lists are swept over."""

    strategy: tuple[str, ...] = ("ddp",)
    """single (the first rank alone), ddp (data parallel over all ranks), pipeline, tensor (layers
    cut by features), hybrid (convolutions data parallel, linear layers cut by features), searched
    (the fastest that planning finds), FILE.json (a strategy's file), zero1, zero2."""
    engine: Literal["auto", "torch", "executor", "deepspeed"] = "auto"
    """Who carries strategies out: torch (single, ddp), executor (all but zero1 and zero2),
    deepspeed (single, ddp, zero1, zero2), or auto: torch for single and ddp, deepspeed for zero1
    and zero2, the executor for the others."""
    batch_size: tuple[int, ...] = ()
    """Global batches: samples of all ranks together in a step (strong scaling). The executor trains
    whole batches only: what an epoch leaves after the last one is dropped."""
    per_device_batch: tuple[int, ...] = ()
    """Batches per device instead: the global batch grows with the ranks (weak scaling). 32 when
    neither is given."""
    schedule: tuple[ScheduleName, ...] = ("1f1b",)
    """pipeline: orders of the microbatches, of gpipe, 1f1b, interleaved and zero_bubble;
    interleaved gives each rank two stages, or more by --stages."""
    microbatches: tuple[int | Literal["auto"], ...] = ("auto",)
    """pipeline: microbatches of a step; auto is the number that is predicted to be fastest, of one,
    two and four for each rank."""
    dtype: tuple[str, ...] = ("fp32",)
    """fp32, tf32, bf16 or fp16; parameters stay fp32, bf16 and fp16 are autocast."""
    n_ranks: tuple[int, ...] = ()
    """Numbers of ranks to train on, the first ones, such as 1 2 4; all when not given."""
    repeats: int = 1
    """Runs of each combination, interleaved in random order, each in processes of its own."""


@dataclass(frozen=True, kw_only=True)
class TrainCase(TrainSettings):
    """One run: a combination of the sweep.

    Attributes:
        engine: the one that carries the strategy out, never `auto`.
        strategy_digest: of the content of a strategy's file, as rank 0 has it.
        batch: the global batch.
        schedule, microbatches: of a pipeline.
    """

    engine: EngineName = "torch"
    strategy: str = "ddp"
    strategy_digest: str = ""
    schedule: ScheduleName = "1f1b"
    microbatches: int | None = None
    dtype: str = "fp32"
    batch: int = 32
    n_ranks: int = 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether microbatches update the weights one by one; of a file's strategy too."""
        return self.asynchronous and (self.strategy == "pipeline" or is_file(self.strategy))

    @property
    def zero_stage(self) -> int:
        return _ZERO_STAGES.get(self.strategy, 0)

    def optimizer_options(self) -> OptimizerOptions:
        return OptimizerOptions(
            name=self.optimizer,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

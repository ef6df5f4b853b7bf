"""The flags of training: what one run is told, and the sweep that the command line asks for."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.errors import ConfigError
from harness.runtime.data import entry_for
from harness.runtime.models import DlrmOptions, ModelOptions, fit_options
from harness.runtime.optimizers import OPTIMIZERS, OptimizerOptions
from harness.runtime.precision import DTYPES

# Which engine carries a strategy out; the number is DeepSpeed's ZeRO stage.
STRATEGIES: dict[tuple[str, str], int] = {
    ("torch", "single"): 0,
    ("torch", "ddp"): 0,
    ("deepspeed", "single"): 0,
    ("deepspeed", "ddp"): 0,
    ("deepspeed", "zero1"): 1,
    ("deepspeed", "zero2"): 2,
}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What every run of a sweep has in common."""

    model: str = "resnet18"
    """lenet, alexnet, vgg16, resnet18, resnet50, resnet152, vit_b_16, dlrm, or your own as
    package.module:factory (a function that returns an nn.Module over images)."""
    data: str = "synthetic"
    """synthetic, cifar10, cifar100, imagefolder, or dlrm_hdf5 (X_int, X_cat, y)."""
    data_dir: Path = Path("data")
    """Directory of the data set (for dlrm_hdf5 the file). Nothing is ever downloaded."""
    n_samples: int = 0
    """Size of synthetic data; 0 is a few global batches. A size that is no multiple of the batch
    makes the last batch of every epoch a smaller one."""
    image_size: int = 0
    """Side of the images; 0 is the data's where the model takes it, else the model's own (224).
    Small ones, such as 64, suit CPUs."""
    n_classes: int = 0
    """Classes to tell apart; 0 is the data's, or 1000 (10 for lenet)."""
    steps: int = 20
    """Optimizer steps that are measured."""
    epochs: int = 0
    """Measure this many passes over the data instead of --steps."""
    warm_up: int = 3
    """Steps before those, not measured."""
    no_sync_steps: int = 5
    """Steps after those without gradient synchronisation: the second reading of what it costs.
    They do not touch what was trained and verified."""
    optimizer: str = "sgd"
    """sgd or adamw."""
    learning_rate: float = 0.01
    """Learning rate, not scaled by anything."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    engine: str = "torch"
    """torch, or deepspeed, which also knows the strategies zero1 and zero2."""
    balance: Literal["equal", "speed"] = "equal"
    """Shares of the ranks in a batch: equal, or in proportion to the speed at which each trains
    this model, measured first. What is trained is the same."""
    batch_norm: Literal["local", "global", "frozen"] = "local"
    """local: each rank normalises by its own samples, as DDP does, which is not what one device
    trains; global: over all ranks (SyncBatchNorm, GPUs only); frozen: by running statistics."""
    dropout: float = -1.0
    """Probability of every dropout layer; below 0 keeps the model's own."""
    bucket_mib: float = 25.0
    """MiB of gradients that DDP reduces together."""
    n_workers: int = 0
    """Processes that load data ahead; 0 loads in the training process."""
    save_model: bool = False
    """Write the trained parameters to the run's directory as model.safetensors."""
    channels_last: bool = False
    """Keep images and filters in channels-last order, which tensor cores prefer."""
    seed: int = 0
    """Seed of weights, data and the order of runs."""
    dlrm_bottom_mlp: tuple[int, ...] = (64, 512, 512, 64)
    """dlrm: widths from the dense features to the width of the embeddings."""
    dlrm_top_mlp: tuple[int, ...] = (576, 1024, 1024, 1024, 1)
    """dlrm: widths from the interaction to one logit."""
    dlrm_table_rows: tuple[int, ...] = (10_000,) * 8
    """dlrm: rows of each table."""
    dlrm_lookups: int = 1
    """dlrm: indices per table and sample."""
    dlrm_interaction: Literal["cat", "dot"] = "cat"
    """dlrm: concatenate all vectors, or take their pairwise products."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainSettings):
    """Train a model and say where the time goes; lists are swept over."""

    strategy: tuple[str, ...] = ("ddp",)
    """single (the first rank alone), ddp (data parallel over all ranks), zero1, zero2."""
    batch_size: tuple[int, ...] = ()
    """Global batches: samples of all ranks together in a step (strong scaling)."""
    per_device_batch: tuple[int, ...] = ()
    """Batches per device instead: the global batch grows with the ranks (weak scaling). 32 when
    neither is given."""
    dtype: tuple[str, ...] = ("fp32",)
    """fp32, tf32, bf16 or fp16; parameters stay fp32, bf16 and fp16 are autocast."""
    rank_counts: tuple[int, ...] = ()
    """Numbers of ranks to train on, the first ones, such as 1 2 4; all when not given."""
    repeats: int = 1
    """Runs of each combination, interleaved in random order, each in processes of its own."""


@dataclass(frozen=True, kw_only=True)
class TrainCase(TrainSettings):
    """One run: a combination of the sweep. `batch` is the global batch."""

    strategy: str = "ddp"
    dtype: str = "fp32"
    batch: int = 32
    n_ranks: int = 1

    @property
    def zero_stage(self) -> int:
        return STRATEGIES[self.engine, self.strategy]

    def model_options(self) -> ModelOptions:
        """What the model is built with, before the data has its say."""
        return ModelOptions(
            n_classes=self.n_classes,
            image_size=self.image_size,
            dropout=None if self.dropout < 0 else self.dropout,
            dlrm=self.dlrm_options(),
        )

    def dlrm_options(self) -> DlrmOptions:
        return DlrmOptions(
            bottom_mlp=self.dlrm_bottom_mlp,
            top_mlp=self.dlrm_top_mlp,
            table_rows=self.dlrm_table_rows,
            n_lookups=self.dlrm_lookups,
            interaction=self.dlrm_interaction,
        )

    def optimizer_options(self) -> OptimizerOptions:
        return OptimizerOptions(
            name=self.optimizer,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )


_AT_LEAST = {
    "steps": 1,
    "epochs": 0,
    "warm_up": 0,
    "no_sync_steps": 0,
    "n_samples": 0,
    "n_workers": 0,
    "image_size": 0,
    "n_classes": 0,
    "repeats": 1,
    "dlrm_lookups": 1,
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_numbers(config: TrainConfig) -> None:
    for name, least in _AT_LEAST.items():
        if getattr(config, name) < least:
            raise ConfigError(f"{_flag(name)} {getattr(config, name)} must be at least {least}")
    for name in ("batch_size", "per_device_batch", "rank_counts", "dlrm_table_rows"):
        if any(value < 1 for value in getattr(config, name)):
            raise ConfigError(f"{_flag(name)} {getattr(config, name)} must be at least 1 each")
    if config.learning_rate <= 0 or config.bucket_mib <= 0:
        raise ConfigError(
            f"--learning-rate {config.learning_rate} and --bucket-mib {config.bucket_mib} must be "
            "above 0"
        )
    if config.dropout >= 1:
        raise ConfigError(f"--dropout {config.dropout} is a probability: give one below 1")


def _check_names(config: TrainConfig) -> None:
    known = sorted({strategy for engine, strategy in STRATEGIES if engine == config.engine})
    if not known:
        raise ConfigError(f"there is no engine {config.engine!r}: choose torch or deepspeed")
    for strategy in config.strategy:
        if strategy not in known:
            raise ConfigError(
                f"--engine {config.engine} has no strategy {strategy!r}: choose from "
                f"{', '.join(known)}"
            )
    for dtype in config.dtype:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}: choose one")
    if config.optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"there is no optimizer {config.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}"
        )


def _check(config: TrainConfig, n_ranks: int) -> None:
    _check_numbers(config)
    _check_names(config)
    if config.batch_size and config.per_device_batch:
        raise ConfigError(
            f"--batch-size {config.batch_size} and --per-device-batch {config.per_device_batch} "
            "both set the batch: give one of them"
        )
    for count in config.rank_counts:
        if count > n_ranks:
            raise ConfigError(
                f"--rank-counts {count} needs {count} ranks, {n_ranks} were started: lower it or "
                "start more (mpirun -np)"
            )


def _batches(config: TrainConfig, n_ranks: int) -> list[int]:
    if config.batch_size:
        return list(config.batch_size)
    return [batch * n_ranks for batch in config.per_device_batch or (32,)]


def _combinations(config: TrainConfig, n_ranks: int) -> list[TrainCase]:
    names = [field.name for field in dataclasses.fields(TrainSettings)]
    shared: dict[str, Any] = {name: getattr(config, name) for name in names}
    cases: list[TrainCase] = []
    for strategy in config.strategy:
        for count in (1,) if strategy == "single" else config.rank_counts or (n_ranks,):
            cases += [
                TrainCase(strategy=strategy, dtype=dtype, batch=batch, n_ranks=count, **shared)
                for dtype in config.dtype
                for batch in _batches(config, count)
            ]
    return cases


def train_cases(config: TrainConfig, n_ranks: int) -> list[TrainCase]:
    """Every combination of the swept flags, each repeat in a random order of its own.

    Raises:
        ConfigError: flags that contradict each other, or the ranks.
        ModelError: an unknown model, or options that it cannot take.
    """
    _check(config, n_ranks)
    combinations = _combinations(config, n_ranks)
    entry = entry_for(config.data, config.model)
    fit_options(config.model, combinations[0].model_options(), entry.image_size, entry.n_channels)
    order = random.Random(config.seed)
    cases: list[TrainCase] = []
    for _ in range(config.repeats):
        cases += order.sample(combinations, len(combinations))
    for case in cases:
        if case.batch < case.n_ranks:
            raise ConfigError(
                f"a global batch of {case.batch} leaves some of {case.n_ranks} ranks without a "
                f"sample: raise --batch-size to {case.n_ranks} or more"
            )
    return cases

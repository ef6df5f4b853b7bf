"""The flags of training: TrainConfig of a command line (a sweep), TrainCase of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.domain.reduce_dtype import ReduceDtype
from harness.domain.schedule import ScheduleName
from harness.domain.shard_state import ShardState
from harness.errors import ConfigError
from harness.inputs import parse_int
from harness.measure.derive.settings import CHANGING
from harness.runtime.data import OF_TEXT, described_data
from harness.runtime.engines.optimizers import (
    OPTIMIZERS,
    LrSchedule,
    OptimizerOptions,
    OuterOptions,
)
from harness.workloads.common.flags import ModelFlags, SearchFlags, flag, shared_flags

EngineName = Literal["torch", "executor", "deepspeed"]

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
# What the executor's --shard-state calls them.
ZERO_STATES = dict(zip(ZERO_STAGES, ("optimizer", "gradients", "parameters"), strict=True))
# Strategies that each engine supports by name; the executor also takes degrees of parallelism
# (tp=2,dp=2) and a strategy's file.
STRATEGIES: dict[EngineName, tuple[str, ...]] = {
    "torch": ("single", "ddp"),
    "executor": ("single", "ddp", "pipeline", "tensor", "hybrid", "searched"),
    "deepspeed": ("single", "ddp", *ZERO_STAGES),
}
# Strategies that --shard-state is for: a file holds its own shard_state.
SHARDABLE = ("ddp", "pipeline", "tensor", "hybrid", "searched")

_ELASTIC = (*CHANGING, "survive")
# Flags that only the executor supports; those of TrainCase.executor_flags depend on others too.
_OF_EXECUTOR = (
    *("exact_dropout", "recompute", "save_sharded", "load_state", "save_every"),
    *_ELASTIC,
)


def is_file(strategy: str) -> bool:
    """Whether --strategy names a strategy's file."""
    return strategy.endswith(".json")


def is_layout(strategy: str) -> bool:
    """Whether --strategy gives degrees of parallelism, such as tp=2,dp=2."""
    return "=" in strategy and not is_file(strategy)


def is_shardable(strategy: str) -> bool:
    """Whether --shard-state is for a strategy."""
    return strategy in SHARDABLE or is_layout(strategy)


def parse_change(text: str) -> tuple[int, Path]:
    """The step and the file of a value of --change.

    Raises:
        ConfigError: it is not STEP:FILE.
    """
    step, _, file = text.partition(":")
    if not (step.isascii() and step.isdigit() and file):
        raise ConfigError(f"--change {text} is not STEP:FILE, such as 100:next.json")
    return parse_int(step, "--change", at_least=1, error=ConfigError), Path(file)


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What is trained on."""

    data: str = "synthetic"
    f"""Data set: {described_data()}, or package.module:factory, which returns your own data
    set."""
    data_dir: Path = Path("data")
    """Directory of the data set (dlrm_hdf5: the file). The harness never downloads data. Your own
    factory gets it, and --seed, if it takes an argument of that name."""
    held_out_dir: Path | None = None
    """Held-out data for --evaluate, in the layout of --data-dir, such as a directory of other
    images or the file dev.tsv of sst2."""
    vocabulary: Path | None = None
    f"""{", ".join(OF_TEXT)}: file of WordPiece tokens, one per line, such as BERT's vocab.txt."""
    n_samples: int | None = None
    """Number of synthetic samples. Default: a few global batches. If the number is no multiple of
    the batch, the last batch of every epoch is smaller."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """How weights are updated."""

    optimizer: str = "sgd"
    f"""{" or ".join(OPTIMIZERS)}."""
    learning_rate: float = 0.01
    """Learning rate; it is not scaled with the batch or the ranks."""
    lr_schedule: LrSchedule = "constant"
    """How the learning rate changes over the measured steps. step: it is multiplied by --lr-gamma
    after every --lr-step-size steps. cosine: it falls to 0 at the last step. The steps of --warm-up
    have the first rate."""
    lr_warm_up: int = 0
    """Measured steps over which the learning rate rises linearly from 0 to --learning-rate, before
    --lr-schedule begins."""
    lr_step_size: int | None = None
    """--lr-schedule step: steps between two drops."""
    lr_gamma: float = 0.1
    """--lr-schedule step: factor of each drop."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    no_decay: tuple[str, ...] = ()
    """Parameters that --weight-decay leaves alone: 1d (fewer than two dims, as biases and weights
    of normalisations), patterns of names such as '*.bias', or several of these."""
    max_grad_norm: float | None = None
    """Scale all gradients of a step down to this norm if their norm is larger. Ranks wait for each
    other to know the norm; predictions do not include this wait."""
    outer_lr: float = 1.0
    """--sync-every: learning rate with which the averaged change of the replicas is applied. 1 with
    no momentum gives the mean of the replicas; DiLoCo has 0.7 with momentum 0.9."""
    outer_momentum: float = 0.0
    """--sync-every: Nesterov momentum of the averaged change."""


@dataclass(frozen=True, kw_only=True)
class StateFlags:
    """What a run saves, and the state from which it continues."""

    save_model: bool = False
    """Write the trained parameters to model.safetensors in the run's directory."""
    save_sharded: bool = False
    """Write each rank's part of the model's and the optimizer's state to
    state/shardRANK.safetensors in the run's directory (executor)."""
    load_state: Path | None = None
    """Start from the state that --save-sharded wrote into this directory (executor). Strategy and
    number of ranks may differ; the data start from the beginning."""
    save_every: int | None = None
    """Write the state of --save-sharded after every so many measured steps, into state/step-STEP;
    the last three states are kept. A launch with --resume continues from the last state, on any
    ranks and by any strategy (executor)."""
    survive: bool = False
    """When a rank's process dies, continue with the other ranks, in a new run: from the last step
    whose state they hold together, else from the last state of --save-every. A plan without each
    rank is searched in advance, beside training (executor)."""
    rejoin: int | None = None
    """--survive: a lost rank trains again after so many steps, in a new process, by the strategy
    from before its loss. If the processes of all ranks die, all start again from the last state of
    --save-every, as long as each such run saves a later state. Default: a lost rank stays out."""


@dataclass(frozen=True, kw_only=True)
class ElasticFlags:
    """A strategy that changes while training."""

    drift: bool = False
    """Measure how fast each device computes. If a device has become faster or slower, search again
    beside training, and change the strategy if this pays in the remaining steps (executor)."""
    drift_threshold: float = 0.25
    """--drift: relative change of a device's speed, up or down, that starts a search."""
    change: tuple[str, ...] = ()
    """STEP:FILE, one or more: from this measured step on, train by the strategy in FILE, in the
    same processes (executor). Ranks may be idle under either strategy."""
    controlled: bool = False
    """Between steps, accept requests of ./entry.sh control RUN --strategy FILE for another strategy
    (executor)."""
    freeze: Literal["none", "schedule", "gradient"] = "none"
    """schedule: stop training layers, from the model's inputs on: F(T) = ceil(L (1 - (1 - a)^T)) of
    L layers after T intervals, as PipeTransformer does; the head is always trained (executor).
    gradient: freeze the layers up to the layer with the least gradient in the interval, but at most
    a share a of the trained layers. Results differ from training all layers."""
    freeze_alpha: float = 1 / 3
    """a of --freeze: largest share of the trained layers that an interval freezes."""
    freeze_interval: int | None = None
    """Steps of an interval of --freeze. Default: an epoch."""
    unfreeze: float | None = None
    """With --freeze and --lr-schedule: train all layers again when the learning rate has dropped by
    this factor, such as 10, since all layers were last trained. The intervals of --freeze then
    begin anew."""
    shrink: Literal["none", "search", "pipetransformer"] = "none"
    """With --freeze: plan again for fewer ranks whenever layers have frozen (executor). search: the
    search plans the frozen model beside training, and the strategy changes if the remaining steps
    gain more than the change costs. pipetransformer: the rule of that system, which balances a
    pipeline by size and halves its length while the largest stage is no larger than at the start.
    """
    replicate: bool = False
    """With --shrink: turn the ranks that it frees into replicas. Otherwise no layer gets more
    replicas than at the start, and these ranks idle."""
    cache: Literal["off", "auto", "on"] = "off"
    """on: keep the outputs of the frozen layers by sample, and stop computing these layers when the
    outputs of all samples are kept. auto: only if reading is measured to be faster (--freeze)."""
    cache_memory: float = 1024.0
    """MiB of shared memory per rank for --cache; further outputs are written to the run's
    directory."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(OptimizerFlags, DataFlags, StateFlags, ElasticFlags, SearchFlags, ModelFlags):
    """Flags that have one value in all runs of a sweep."""

    steps: int | None = None
    """Number of measured optimizer steps. Default: 20, or as many as --epochs takes."""
    epochs: int | None = None
    """Number of measured passes over the data, instead of --steps."""
    warm_up: int = 3
    """Steps before the measured ones; they are trained, but not recorded."""
    no_sync_steps: int = 5
    """Number of extra steps without communication after verification. They give a second estimate
    of exposed communication, and the time of computing alone. 0 skips them."""
    noise_steps: int = 0
    """Number of extra steps after verification that measure the gradient noise scale: up to about
    this batch, a larger batch needs few more samples for the same loss (64 is a good number). The
    loss must be a mean over samples or their targets."""
    noise_every: int | None = None
    """--noise-steps: measure also after every so many measured steps; the scale is then its mean
    over the training. Training stands still meanwhile, and is not changed."""
    profiler_steps: int = 0
    """Number of extra steps under torch.profiler after verification. Each rank writes their
    operators and kernels to rank<k>.pt.trace.json.gz in the run's directory on its host, and the
    longest ones are listed."""
    balance: Literal["equal", "speed"] = "equal"
    """ddp: how a batch is divided among ranks: equally, or in proportion to each rank's speed,
    which is measured before training (executor: taken from the profile). Both compute the gradient
    of the same global batch."""
    exact_dropout: bool = False
    """Make every shard use its part of the dropout masks of one device, so that all strategies with
    the same microbatches give the same result (executor). Otherwise each rank draws its own masks,
    as DDP does."""
    stages: int | None = None
    """pipeline: number of stages, balanced by the profile. With fewer stages than ranks, some
    stages are replicated. Default: one stage per rank (interleaved: two)."""
    recompute: bool = False
    """Activation checkpointing: keep only the inputs of parts of the model, and run each part's
    forward again before its backward, which saves memory and costs time (executor)."""
    recompute_segments: int | None = None
    """--recompute: largest number of parts of each stage, up to 64. Default: 1 in pipelines, whose
    stages then run again while they wait for gradients; else the number that needs the least
    memory."""
    asynchronous: bool = False
    """pipeline or a strategy file, with schedule 1f1b: train as PipeDream does. Every microbatch is
    a minibatch with its own optimizer step, and the pipeline never drains. Stage s of S (from 0)
    computes gradients with weights that are S - 1 - s updates old, so results differ from one
    device's."""
    predict: bool = False
    """Predict the steps of single and ddp too. Links and operators are measured first if the
    results directory lacks them. All other strategies of the executor are always predicted."""
    bucket_mib: float = 25.0
    """MiB of gradients in a bucket, which is all-reduced as a whole. With 25, DDP's default, the
    first bucket is smaller, so that communication starts early."""
    n_workers: int = 0
    """Processes per rank that load data in advance; 0 loads in the training process."""
    evaluate: bool = False
    """After each epoch, measure loss and accuracy on held-out data: those of digits and cifar, of
    --held-out-dir, or of your own data if the factory returns a pair. Training stands still
    meanwhile; the time of an epoch does not include the evaluation."""
    evaluate_every: int | None = None
    """Steps between two evaluations, for --evaluate. Default: an epoch."""
    seed: int = 0
    """Seed of weights, data and the order of runs."""

    def is_set(self, name: str) -> bool:
        """Whether a flag differs from its default."""
        return bool(getattr(self, name) != getattr(TrainSettings, name))

    @property
    def executor_flags(self) -> list[str]:
        """Names of the flags that are set and that only the executor supports."""
        return [name for name in _OF_EXECUTOR if self.is_set(name)]

    @property
    def elastic_flags(self) -> list[str]:
        """Names of the flags that are set by which the strategy may change between steps, or go on
        without a lost rank."""
        return list(filter(self.is_set, _ELASTIC))

    @property
    def is_elastic(self) -> bool:
        return bool(self.elastic_flags)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainSettings):
    """Train a model and measure the phases of its steps; every flag that takes a list is swept."""

    strategy: tuple[str, ...] = ("ddp",)
    """One or more of: single (rank 0 only), ddp (data parallel), pipeline, tensor (layers cut by
    features), hybrid (convolutions data parallel, linear layers cut by features), searched (the
    plan that search finds), degrees such as tp=2,dp=2,pp=1 (tensor x data x pipeline parallel, as
    for `harness.plan predict --layout`), FILE.json (a strategy file), zero1, zero2, zero3."""
    engine: Literal["auto", "torch", "executor", "deepspeed"] = "auto"
    """Code that trains: torch (single, ddp), executor (all but zero1 to zero3), deepspeed (single,
    ddp, zero1 to zero3). auto: torch for single and ddp, deepspeed for zero1 to zero3, else the
    executor."""
    batch_size: tuple[int, ...] = ()
    """Global batches: samples of all ranks together in a step (strong scaling). The executor trains
    full batches only and drops the remainder of each epoch."""
    per_device_batch: tuple[int, ...] = ()
    """Batches per device, instead of --batch-size: the global batch grows with the number of ranks
    (weak scaling). Without either, the global batch is 32 for each rank, and single trains it too.
    """
    schedule: tuple[ScheduleName, ...] = ("1f1b",)
    """pipeline or degrees: order of the microbatches. interleaved is for pipeline only, and gives
    each rank two stages, or more with --stages."""
    microbatches: tuple[int | Literal["auto"], ...] = ("auto",)
    """pipeline or degrees: microbatches per step. auto predicts steps with one, two and four
    microbatches per rank and takes the fastest (degrees without a pipeline: one microbatch)."""
    dtype: tuple[str, ...] = ("fp32",)
    """fp32, tf32, bf16 or fp16. Parameters stay fp32; bf16 and fp16 use autocast."""
    reduce_dtype: tuple[ReduceDtype, ...] = ("fp32",)
    """bf16 and int8 (256 numbers share a scale) round gradients where ranks sum them, to half and a
    quarter of their bytes on the links; parameters and optimizer state stay fp32, and losses differ
    a little from one device's. zero1 to zero3 have no int8."""
    sync_every: tuple[int, ...] = (1,)
    """ddp, degrees with dp, and files: each replica updates its own parameters, and every parameter
    is averaged over the replicas every N steps (local SGD, streaming DiLoCo). Each step averages an
    N-th of the parameters beside its computing, so links carry an N-th of the gradients' bytes.
    Above 1, results differ from the training of one device."""
    n_ranks: tuple[int, ...] = ()
    """Numbers of ranks to train on, counted from rank 0, such as 1 2 4. Default: all."""
    repeats: int = 1
    """Runs of each combination, interleaved in random order, each in new processes."""


@dataclass(frozen=True, kw_only=True)
class TrainCase(TrainSettings):
    """One run: a combination of the sweep.

    Attributes:
        engine: the engine that trains, never `auto`.
        strategy_digest: hash of the strategy's file on rank 0; empty without a file.
        code_digest: hash of the user's own code of model and data; empty without any.
        batch: the global batch.
        schedule, microbatches: used by `pipeline` and degrees only; None: automatic.
        first_step: the first measured step; above 0 after the loss of ranks, without warm-up.
        until: the run ends before this measured step, because a lost rank joins again then.
        continues: id of the run that this one continues; empty if none.
        asked_strategy: the launch's --strategy, of a run that continues another.
    """

    steps: int = 20
    engine: EngineName = "torch"
    strategy: str = "ddp"
    strategy_digest: str = ""
    code_digest: str = ""
    schedule: ScheduleName = "1f1b"
    microbatches: int | None = None
    dtype: str = "fp32"
    reduce_dtype: ReduceDtype = "fp32"
    sync_every: int = 1
    batch: int = 32
    n_ranks: int = 1
    first_step: int = 0
    until: int | None = None
    continues: str = ""
    asked_strategy: str = ""

    @property
    def is_asynchronous(self) -> bool:
        """Whether every microbatch updates the weights."""
        return self.asynchronous and (self.strategy == "pipeline" or is_file(self.strategy))

    @property
    def sharded_state(self) -> ShardState:
        """The state that --shard-state shards in this run; of searched plans the search knows."""
        if not is_shardable(self.strategy) or self.shard_state == "auto":
            return "none"
        return self.shard_state

    @property
    def executor_flags(self) -> list[str]:
        has_averages = self.is_set("ema") and self.engine == "deepspeed"
        others = {"ema": has_averages, "shard_state": self.sharded_state != "none"}
        return [*super().executor_flags, *(name for name, is_given in others.items() if is_given)]

    def outer_options(self) -> OuterOptions | None:
        if self.sync_every == 1:
            return None
        return OuterOptions(
            sync_every=self.sync_every,
            learning_rate=self.outer_lr,
            momentum=self.outer_momentum,
        )

    def check_averages(self, n_steps: int) -> None:
        """Refuse to use the average of replicas after fewer steps than it has parts."""
        n_all = self.warm_up + n_steps
        for name in filter(self.is_set, ("evaluate", "save_model")):
            if self.sync_every > n_all:
                raise ConfigError(
                    f"{flag(name)} takes the average of the replicas, of which --sync-every "
                    f"{self.sync_every} makes a part in each step, and the run has {n_all} steps "
                    "with --warm-up: lower it, or train more steps"
                )

    def optimizer_options(self) -> OptimizerOptions:
        return OptimizerOptions(name=self.optimizer, **shared_flags(self, OptimizerOptions))

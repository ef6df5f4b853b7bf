"""The flags of the profile and search workloads, and the measurements that a search needs.

Each operator is measured at each shape of its shards: shapes from cuts of the batch (data
parallelism, microbatches) and cuts of the weights (features of linear, convolution and embedding;
contraction of linear; heads of attention). Operators with equal signatures share a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.domain.graph import Graph, Operator
from harness.domain.partition import cut_dim
from harness.domain.profile import default_profile
from harness.domain.reduce_dtype import REDUCED_BYTES, ReduceDtype
from harness.domain.sharding import full_shape, has_tasks, is_partial, output_sizes, weight_dims
from harness.errors import ConfigError
from harness.plan.simulate.options import SimulatorOptions
from harness.runtime.devices.precision import wire_bytes_per_fp32_byte
from harness.runtime.devices.sampling import Budget
from harness.runtime.engines.optimizers import OPTIMIZERS, OptimizerOptions, check_optimizer
from harness.runtime.models import fit_options
from harness.runtime.models.task import ModelOptions
from harness.workloads.common.flags import (
    Dtype,
    ModelFlags,
    SearchFlags,
    check_above_zero,
    check_at_least,
    fitted_flags,
    shared_flags,
)

# Shards of other kinds take time in proportion to their elements, which cuts by samples measure.
_CUT_BY_WEIGHTS = ("linear", "conv2d", "embedding", "attention")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement.

    Attributes:
        operator: the name of one operator with this signature.
        key: its `profile_key`.
        shape: shape of the shard's output, as the simulator looks it up.
        samples: number of samples that the model is fed.
        dim, size: the dim along which the weights are cut, and its size in the shard; empty if
            the weights are whole.
    """

    operator: str
    key: str
    shape: dict[str, int]
    samples: int
    dim: str = ""
    size: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        return self.key, tuple(self.shape.items())


def shard_counts(n_ranks: int) -> list[int]:
    """1 to 4, the number of ranks, and powers of two up to it (at least 8)."""
    powers = [2**k for k in range(12) if 2**k <= max(8, n_ranks)]
    return sorted({1, 2, 3, 4, n_ranks, *powers})


def part_sizes(size: int, counts: Sequence[int]) -> list[int]:
    """Distinct sizes of the parts of a dim that is cut into each of `counts`, largest first."""
    found = {b - a for n in counts if n <= size for a, b in cut_dim(size, n)}
    return sorted(found, reverse=True)


def _shard_shapes(operator: Operator, counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield (dim, size) of each proper part of the weights."""
    if operator.kind not in _CUT_BY_WEIGHTS:
        return
    full = full_shape(operator, batch=1, graph_batch=None)
    for dim in weight_dims(operator):
        size = full.get(dim, 0)
        yield from ((dim, part) for part in part_sizes(size, counts) if part < size)


def _points_of(
    operator: Operator, graph: Graph, samples: int, counts: Sequence[int]
) -> Iterator[Point]:
    full = full_shape(operator, batch=samples, graph_batch=graph.batch)
    key = operator.profile_key
    shown = output_sizes(operator, full)
    yield Point(operator=operator.name, key=key, shape=shown, samples=samples)
    if samples == graph.batch:
        for dim, size in _shard_shapes(operator, counts):
            whole = full if is_partial(operator, dim) else shown
            shape = {**whole, dim: size}
            yield Point(
                operator=operator.name, key=key, shape=shape, samples=samples, dim=dim, size=size
            )


def points_of(
    graph: Graph, batch_counts: Sequence[int], weight_counts: Sequence[int]
) -> list[Point]:
    """List every distinct measurement, large batches first.

    Args:
        batch_counts: numbers of parts that the batch is cut into; 1 is always included.
        weight_counts: numbers of parts that weights are cut into.
    """
    assert graph.batch is not None
    found: dict[object, Point] = {}
    for samples in part_sizes(graph.batch, [1, *batch_counts]):
        for operator in filter(has_tasks, graph.operators):
            for point in _points_of(operator, graph, samples, weight_counts):
                found.setdefault(point.identity, point)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(ModelFlags):
    """Time each operator of a model on each kind of device; search reads the file."""

    n_channels: int | None = None
    """Channels of the images. Default: the model's."""
    batch_size: int = 64
    """Global batch: operators are timed on all of its samples and on parts of it."""
    dtype: Dtype = "fp32"
    """Data type of training. Parameters stay fp32; bf16 and fp16 use autocast. Each dtype has its
    own profile file."""
    optimizer: str = "sgd"
    f"""{" or ".join(OPTIMIZERS)}; the optimizer's step is timed too."""
    momentum: float = 0.9
    """Momentum of sgd. Without momentum (0) the optimizer's step is faster."""
    shards: tuple[int, ...] = ()
    """Numbers of parts into which operators are cut, by samples and by weights; each part is timed.
    Default: 1 to 4, the number of ranks, and powers of two up to it (at least to 8). Times of other
    parts are fitted."""
    profile_file: Path | None = None
    """The profile to write; measurements that the file already holds are not repeated. Default:
    profile-MODEL.json (profile-MODEL-bf16-compiled.json and so on) in the results directory. The
    graph is written beside the profile as .graph.json."""
    time_budget_s: float | None = None
    """Seconds for which each operator is sampled, unless --min-samples takes longer. Default: 0.2,
    and 0.02 on GPUs, whose samples differ less."""
    min_samples: int = 6
    """Minimum number of samples of each operator."""
    rounds: int = 3
    """Number of passes over all operators. Each pass takes a part of the samples, so that a
    temporary slowdown of the machine is spread over all operators."""
    warm_up: int = 2
    """Executions of each operator before its samples, in each round; they are discarded."""

    def model_options(self) -> ModelOptions:
        """Options that the model is built with.

        Raises:
            ModelError: the model is unknown or does not accept the options.
        """
        return fit_options(
            self.model, replace(self.given_options(), n_channels=self.n_channels or 0)
        )

    def optimizer_options(self) -> OptimizerOptions:
        return OptimizerOptions(name=self.optimizer, momentum=self.momentum)

    def with_local_norms(self) -> ProfileConfig:
        """Replace global batch norm by local: one device takes equally long for either."""
        return replace(self, batch_norm="local") if self.batch_norm == "global" else self

    def budget(self, device_type: str) -> Budget:
        """Samples of one operator in one round."""
        usual_s = 0.02 if device_type == "cuda" else 0.2
        return Budget(
            time_s=(self.time_budget_s or usual_s) / self.rounds,
            n_min=math.ceil(self.min_samples / self.rounds),
            n_max=100,
            n_warm_up=self.warm_up,
        )

    def counts(self, n_ranks: int) -> list[int]:
        """Numbers of parts: --shards, or the default for this number of ranks."""
        return sorted(set(self.shards)) if self.shards else shard_counts(n_ranks)

    def path(self, results: Path) -> Path:
        if self.profile_file is not None:
            return self.profile_file
        kinds = {"channels_last": self.channels_last, "compiled": self.compile}
        return default_profile(
            self.model, self.dtype, results, kinds=[kind for kind, is_on in kinds.items() if is_on]
        )


def profile_cases(config: ProfileConfig, n_ranks: int) -> list[ProfileConfig]:
    """Check the flags and return one run, with the model's options filled in."""
    config.check()
    ones = ("batch_size", "n_channels", "min_samples", "rounds", "warm_up")
    check_at_least(config, {**dict.fromkeys(ones, 1), "momentum": 0})
    check_above_zero(config, ("time_budget_s",))
    check_optimizer(config.optimizer)
    wrong = [n for n in config.shards if not 1 <= n <= config.batch_size]
    if wrong:
        raise ConfigError(
            f"--shards {wrong[0]} must be between 1 and --batch-size {config.batch_size}: a part "
            "needs a sample"
        )
    return [replace(config.with_local_norms(), **fitted_flags(config.model_options()))]


@dataclass(frozen=True, kw_only=True)
class SearchConfig(SearchFlags, ModelFlags):
    """Find the fastest strategy for a model on these ranks; `train --strategy searched` runs it."""

    n_channels: int | None = None
    """Channels of the images. Default: the model's."""
    batch_size: int = 64
    """Global batch: samples of all ranks together in a step."""
    dtype: Dtype = "fp32"
    """Data type of training."""
    optimizer: str = "sgd"
    f"""{" or ".join(OPTIMIZERS)}; plans include the optimizer's memory and time."""
    momentum: float = 0.9
    """Momentum of sgd."""
    bucket_mib: float = 25.0
    """MiB of gradients in a bucket, which is all-reduced as a whole."""
    reduce_dtype: ReduceDtype = "fp32"
    """bf16 and int8 round gradients for their sum over ranks: half and a quarter of the bytes."""
    n_ranks: int | None = None
    """Number of ranks to plan for, from rank 0 on. Default: all."""
    seed: int = 0
    """Seed of the search. Equal seeds find equal plans, unless --search-seconds ends the search."""

    def model_options(self) -> ModelOptions:
        """Options that the model is built with.

        Raises:
            ModelError: the model is unknown or does not accept the options.
        """
        return self.profile_config().model_options()

    def optimizer_options(self) -> OptimizerOptions:
        return OptimizerOptions(name=self.optimizer, momentum=self.momentum, ema=self.ema)

    def profile_config(self, n_parts: int = 1) -> ProfileConfig:
        """The flags of the profile that planning needs.

        Args:
            n_parts: a further number of parts that the batch is cut into (microbatches).
        """
        usual = shard_counts(self.n_ranks or 1)
        config = ProfileConfig(
            **shared_flags(self, ProfileConfig),
            shards=() if n_parts in usual else tuple(sorted((*usual, n_parts))),
        )
        return config.with_local_norms()

    def simulator_options(self) -> SimulatorOptions:
        """Options of the simulator without an optimizer's speed; buckets overlap with backward, as
        in DDP."""
        return SimulatorOptions(
            overlap=True,
            batch_norm=self.norm_scope,
            bucket_bytes=round(self.bucket_mib * (1 << 20)),
            reduce_bytes_per_gradient_byte=REDUCED_BYTES[self.reduce_dtype],
            wire_bytes_per_fp32_byte=wire_bytes_per_fp32_byte(self.dtype),
        )


def search_cases(config: SearchConfig, n_ranks: int) -> list[SearchConfig]:
    """Check the flags and return one run, with the defaults of model and launch filled in, so that
    equal searches have equal configurations."""
    config.check()
    least = {"batch_size": 1, "n_channels": 1, "momentum": 0, "n_ranks": 1, "seed": 0}
    check_at_least(config, least)
    check_above_zero(config, ("bucket_mib",))
    config.check_search()
    check_optimizer(config.optimizer)
    if config.n_ranks is not None and config.n_ranks > n_ranks:
        raise ConfigError(
            f"--n-ranks {config.n_ranks} needs as many ranks, {n_ranks} were started: lower it or "
            "start more (mpirun -np)"
        )
    flags = fitted_flags(config.model_options())
    return [replace(config, **flags, n_ranks=config.n_ranks or n_ranks)]

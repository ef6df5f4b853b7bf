"""The flags of the search workload; a training run's plan depends on the same flags."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.errors import ConfigError
from harness.plan.simulate.options import OPTIMIZERS, SimulatorOptions
from harness.runtime.devices.precision import wire_bytes_per_fp32_byte
from harness.runtime.engines.optimizers import OptimizerOptions, check_optimizer
from harness.runtime.models import ModelOptions
from harness.workloads.common.flags import (
    Dtype,
    ModelFlags,
    SearchFlags,
    check_above_zero,
    check_at_least,
    fitted_flags,
    shared_flags,
)
from harness.workloads.planning.profile_config import ProfileConfig, shard_counts


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
    """sgd or adamw; its state needs memory and its step needs time."""
    momentum: float = 0.9
    """Momentum of sgd."""
    bucket_mib: float = 25.0
    """MiB of gradients in a bucket, which is all-reduced as a whole."""
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
        return OptimizerOptions(name=self.optimizer, momentum=self.momentum)

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

    def simulator_options(
        self,
        *,
        optimizer_s_per_byte: tuple[float, ...],
    ) -> SimulatorOptions:
        """Options of the simulator; buckets overlap with backward, as in DDP.

        Args:
            optimizer_s_per_byte: seconds per byte of parameters in an optimizer's step, by device.
        """
        n_states, n_streams = OPTIMIZERS[self.optimizer_options().variant]
        return SimulatorOptions(
            overlap=True,
            batch_norm=self.norm_scope,
            bucket_bytes=round(self.bucket_mib * (1 << 20)),
            n_optimizer_states=n_states,
            optimizer_s_per_byte=optimizer_s_per_byte,
            stream_s_per_byte=tuple(rate / n_streams for rate in optimizer_s_per_byte),
            wire_bytes_per_fp32_byte=wire_bytes_per_fp32_byte(self.dtype),
        )


def search_cases(config: SearchConfig, n_ranks: int) -> list[SearchConfig]:
    """Check the flags and return one run, with the defaults of model and launch filled in, so that
    equal searches have equal configurations.

    Raises:
        ConfigError: a number is out of range.
        ModelError: the model is unknown or does not accept the options.
    """
    _check(config, n_ranks)
    flags = fitted_flags(config.model_options())
    return [replace(config, **flags, n_ranks=config.n_ranks or n_ranks)]


_AT_LEAST = {"batch_size": 1, "n_channels": 1, "momentum": 0, "n_ranks": 1}


def _check(config: SearchConfig, n_ranks: int) -> None:
    config.check()
    check_at_least(config, _AT_LEAST)
    check_above_zero(config, ("bucket_mib",))
    config.check_search()
    check_optimizer(config.optimizer)
    if config.n_ranks is not None and config.n_ranks > n_ranks:
        raise ConfigError(
            f"--n-ranks {config.n_ranks} needs as many ranks, {n_ranks} were started: lower it or "
            "start more (mpirun -np)"
        )

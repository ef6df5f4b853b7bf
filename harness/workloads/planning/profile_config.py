"""The flags of the profile workload, and where its files go."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from harness.errors import ConfigError
from harness.measure.store import check_place
from harness.plan.find import default_profile
from harness.runtime.devices.sampling import Budget
from harness.runtime.engines.optimizers import OptimizerOptions, check_optimizer
from harness.runtime.models import ModelOptions, fit_options
from harness.workloads.common.model_flags import ModelFlags, fitted_flags
from harness.workloads.common.number_flags import check_above_zero, check_at_least
from harness.workloads.planning.profile_points import shard_counts


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(ModelFlags):
    """How long each operator of a model takes on each kind of device; planning reads the file."""

    n_channels: int | None = None
    """Channels of the images; by default the model's own."""
    batch_size: int = 64
    """Samples that the whole operators are measured on; their shards get parts of it."""
    dtype: Literal["fp32", "tf32", "bf16"] = "fp32"
    """What training computes in; parameters stay fp32, bf16 is autocast. One file holds one."""
    optimizer: str = "sgd"
    """sgd or adamw: its step is timed too."""
    momentum: float = 0.9
    """Momentum of sgd: without it (0) a step is shorter."""
    shards: tuple[int, ...] = ()
    """Measure operators cut into these numbers of parts, by samples and by weights; by default 1 to
    4, the number of ranks, and powers of two up to it (at least 8). What lies between is fitted."""
    profile_file: Path | None = None
    """Where the profile goes, and what is measured already is taken from; by default
    profile-MODEL.json in the directory of results (profile-MODEL-bf16.json and so on). The graph
    goes beside it as .graph.json."""
    time_budget_s: float = 0.2
    """Sample each operator for about this long, but --min-samples at least."""
    min_samples: int = 6
    """Fewest samples of each operator."""
    rounds: int = 3
    """Go over all operators this often, and take a part of the samples of each every time: what
    slows the machine for a while slows no operator alone."""
    warm_up: int = 2
    """Runs of each operator that are thrown away before, in each round."""

    def model_options(self) -> ModelOptions:
        """What the model is built with.

        Raises:
            ModelError: an unknown model, or options that it cannot take.
        """
        return fit_options(
            self.model, replace(self.asked_options(), n_channels=self.n_channels or 0)
        )

    def optimizer_options(self) -> OptimizerOptions:
        return OptimizerOptions(name=self.optimizer, momentum=self.momentum)

    def of_a_device(self) -> ProfileConfig:
        """With local statistics where they are global: a device computes by both equally long."""
        return replace(self, batch_norm="local") if self.batch_norm == "global" else self

    def budget(self) -> Budget:
        """Of one operator in one round."""
        return Budget(
            time_s=self.time_budget_s / self.rounds,
            n_min=math.ceil(self.min_samples / self.rounds),
            n_max=100,
            n_warm_up=self.warm_up,
        )

    def counts(self, n_ranks: int) -> list[int]:
        """Numbers of parts, as asked or by default."""
        return sorted(set(self.shards)) if self.shards else shard_counts(n_ranks)

    def path(self, results: Path) -> Path:
        """The profile file."""
        if self.profile_file is not None:
            return self.profile_file
        return default_profile(self.model, self.dtype, results)


_AT_LEAST = {
    "batch_size": 1,
    "n_channels": 1,
    "momentum": 0,
    "min_samples": 1,
    "rounds": 1,
    "warm_up": 1,
}


def check_profile(config: ProfileConfig) -> None:
    """Refuse a profile file that cannot be written.

    Raises:
        ResultsError: names it.
    """
    if config.profile_file is not None:
        check_place("--profile-file", config.profile_file)


def profile_cases(config: ProfileConfig, n_ranks: int) -> list[ProfileConfig]:
    """One run, with what was left to the model filled in; checks the flags.

    Raises:
        ConfigError: a number that makes no sense.
        ModelError: an unknown model, or options that it cannot take.
    """
    config.check()
    check_at_least(config, _AT_LEAST)
    check_above_zero(config, ("time_budget_s",))
    check_optimizer(config.optimizer)
    wrong = [n for n in config.shards if not 1 <= n <= config.batch_size]
    if wrong:
        raise ConfigError(
            f"--shards {wrong[0]} must be between 1 and --batch-size {config.batch_size}: a part "
            "needs a sample"
        )
    return [replace(config.of_a_device(), **fitted_flags(config.model_options()))]

"""The comparison that `./entry.sh` runs when no workload is named.

It measures devices, links and operators, searches, and trains one model at one global batch by
`single`, `ddp`, `pipeline` and `searched`, with enough repeats for the verdicts. On GPUs of unlike
kinds `ddp` runs with shares by speed, too.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.domain.run import RankInfo
from harness.workloads.links.workload import LinksConfig
from harness.workloads.matmul.workload import MatmulConfig
from harness.workloads.planning.config import ProfileConfig, SearchConfig
from harness.workloads.train.cases import train_cases
from harness.workloads.train.config import TrainConfig
from harness.workloads.train.plan import search_config_of


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """The training that strategies are compared by."""

    model: str | None = None
    """Model that is trained: a model of `train --help`, or your own as package.module:factory.
    Default: resnet50 on GPUs, dlrm on CPUs."""
    batch_size: int | None = None
    """Global batch: samples of all ranks together in a step; single trains the same batch. Default:
    on GPUs 128, or less if a GPU cannot hold 128 images of resnet50; on CPUs 512."""
    dtype: str | None = None
    """Data type of training. Default: on GPUs bf16, else fp16, else fp32, the first that all GPUs
    have; on CPUs fp32."""

    def of(self, default: TrainConfig) -> TrainConfig:
        """The default training with this model, batch and dtype."""
        return dataclasses.replace(
            default,
            model=self.model or default.model,
            batch_size=default.batch_size if self.batch_size is None else (self.batch_size,),
            dtype=default.dtype if self.dtype is None else (self.dtype,),
        )


_STRATEGIES = ("single", "ddp", "pipeline", "searched")
# Seven repeats that do not overlap seven others are the fewest that give a verdict.
_N_REPEATS = 7
# Of ResNet-50 on one device, with the allocator's share: in 16 bits and in fp32.
_BYTES_A_SAMPLE, _FP32_BYTES_A_SAMPLE = 46e6, 92e6


def _dtype(gpus: Sequence[RankInfo]) -> str:
    """bf16, or what all GPUs have: fp16 before Ampere, fp32 before Volta. Unknown GPUs have all."""
    peaks = [gpu.peak_flops_per_s for gpu in gpus if gpu.peak_flops_per_s]
    return next((d for d in ("bf16", "fp16") if all(d in own for own in peaks)), "fp32")


def _batch(gpus: Sequence[RankInfo], dtype: str) -> int:
    """128, or less if a GPU cannot hold its activations: `single` trains the whole batch."""
    batch, each = 128, _FP32_BYTES_A_SAMPLE if dtype == "fp32" else _BYTES_A_SAMPLE
    smallest = min((gpu.training_bytes for gpu in gpus), default=2**60)
    while batch > 8 and batch * each > smallest:
        batch //= 2
    return batch


def _training(gpus: Sequence[RankInfo] | None) -> TrainConfig:
    """Choose a model whose step is long enough to measure and short enough to repeat."""
    if gpus is not None:
        dtype = _dtype(gpus)
        return TrainConfig(
            model="resnet50",
            strategy=_STRATEGIES,
            dtype=(dtype,),
            batch_size=(_batch(gpus, dtype),),
            steps=50,
            repeats=_N_REPEATS,
            predict=True,
        )
    # 32 MB of gradients: at 1 Gbit/s their all-reduce takes about as long as computing.
    return TrainConfig(
        model="dlrm",
        strategy=_STRATEGIES,
        batch_size=(512,),
        steps=8,
        warm_up=2,
        no_sync_steps=3,
        search_seconds=20.0,
        repeats=_N_REPEATS,
        predict=True,
    )


def _profile(search_config: SearchConfig, n_ranks: int, *, has_gpu: bool) -> ProfileConfig:
    """Profile shards of data parallelism and of pipelines' microbatches, on one GPU whole operators
    only; others are fitted."""
    config = search_config.profile_config()
    shards = {1, 2, n_ranks, 4 * n_ranks} if n_ranks > 1 or not has_gpu else {1}
    config = dataclasses.replace(config, shards=tuple(sorted(shards)))
    if has_gpu:
        return config
    return dataclasses.replace(config, min_samples=6, rounds=6, warm_up=1)


def comparison(
    asked: ComparisonConfig, *, gpus: Sequence[RankInfo] | None, n_ranks: int
) -> list[tuple[str, Any]]:
    """Workloads with their configurations, in order; on one rank `single` is the only strategy.

    Args:
        gpus: all ranks, if each has a GPU of its own; empty: GPUs of any kind; None: CPUs.
    """
    training, has_gpu = asked.of(_training(gpus)), gpus is not None
    searched = dataclasses.replace(training, strategy=("searched",), repeats=1)
    search_config = search_config_of(train_cases(searched, n_ranks)[0])
    if n_ranks == 1:
        # A flag of the search is refused where `searched` is not trained.
        default = TrainConfig.search_seconds
        training = dataclasses.replace(training, strategy=("single",), search_seconds=default)
    matmul, links = MatmulConfig(), LinksConfig()
    if not has_gpu:  # the whole comparison should take minutes
        matmul = MatmulConfig(time_budget_s=0.3, distributed_samples=3)
        # All sizes, because planning would otherwise measure the links again.
        links = LinksConfig(time_budget_s=0.05)
    trained = [training]
    if len({gpu.device_kind for gpu in gpus or ()}) > 1:
        trained.append(dataclasses.replace(training, strategy=("ddp",), balance="speed"))
    return [
        ("matmul", matmul),
        ("links", links),
        ("profile", _profile(search_config, n_ranks, has_gpu=has_gpu)),
        ("search", search_config),
        *(("train", one) for one in trained),
    ]

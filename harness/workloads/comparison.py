"""The comparison that `./entry.sh` runs when no workload is named.

It measures devices, links and operators, searches, and trains one model at one global batch by
`single`, `ddp`, `pipeline` and `searched`, with enough repeats for the verdicts.
"""

import dataclasses
from typing import Any

from harness.workloads.links.workload import LinksConfig
from harness.workloads.matmul.workload import MatmulConfig
from harness.workloads.planning.config import ProfileConfig, SearchConfig
from harness.workloads.train.cases import train_cases
from harness.workloads.train.config import TrainConfig
from harness.workloads.train.plan import search_config_of

_STRATEGIES = ("single", "ddp", "pipeline", "searched")
# Seven repeats that do not overlap seven others are the fewest that give a verdict.
_N_REPEATS = 7


def _training(*, has_gpu: bool) -> TrainConfig:
    """Choose a model whose step is long enough to measure and short enough to repeat."""
    if has_gpu:
        return TrainConfig(
            model="resnet50",
            strategy=_STRATEGIES,
            dtype=("bf16",),
            batch_size=(128,),
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
    """Profile shards of data parallelism and of pipelines' microbatches; others are fitted."""
    config = search_config.profile_config()
    if has_gpu:
        return config
    shards = {1, 2, n_ranks, 4 * n_ranks}
    return dataclasses.replace(
        config, shards=tuple(sorted(shards)), min_samples=6, rounds=6, warm_up=1
    )


def _matmul_and_links(*, has_gpu: bool) -> tuple[MatmulConfig, LinksConfig]:
    """Short measurements on CPUs, where the whole comparison should take minutes."""
    if has_gpu:
        return MatmulConfig(), LinksConfig()
    # All sizes, because planning would otherwise measure the links again.
    return MatmulConfig(time_budget_s=0.3, distributed_samples=3), LinksConfig(time_budget_s=0.05)


def comparison(*, has_gpu: bool, n_ranks: int) -> list[tuple[str, Any]]:
    """Workloads with their configurations, in order; on one rank `single` is the only strategy."""
    training = _training(has_gpu=has_gpu)
    searched = dataclasses.replace(training, strategy=("searched",), repeats=1)
    search_config = search_config_of(train_cases(searched, n_ranks)[0])
    if n_ranks == 1:
        # A flag of the search is refused where `searched` is not trained.
        default = TrainConfig.search_seconds
        training = dataclasses.replace(training, strategy=("single",), search_seconds=default)
    matmul, links = _matmul_and_links(has_gpu=has_gpu)
    return [
        ("matmul", matmul),
        ("links", links),
        ("profile", _profile(search_config, n_ranks, has_gpu=has_gpu)),
        ("search", search_config),
        ("train", training),
    ]

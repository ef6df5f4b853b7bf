"""The comparison that `./entry.sh` runs when no workload is named.

How fast are the devices and the links, what does planning make of that, and is it true? One model,
the same global batch on one device, data parallel, as a balanced pipeline, and by the strategy that
the search finds, each repeated often enough that the verdicts can decide.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.workloads.links.workload import LinksConfig
from harness.workloads.matmul.workload import MatmulConfig
from harness.workloads.planning.profile_config import ProfileConfig
from harness.workloads.planning.search_config import SearchConfig
from harness.workloads.train.cases import train_cases
from harness.workloads.train.config import TrainConfig
from harness.workloads.train.search_config import search_config_of

_STRATEGIES = ("single", "ddp", "pipeline", "searched")
# Two sides of seven each, fully apart, are the fewest that can call a difference.
_N_REPEATS = 7


def _training(*, has_gpu: bool) -> TrainConfig:
    """A model whose step takes long enough to measure and short enough to repeat."""
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
    # 32 MB of gradients: on links of 1 Gbit/s as much work to reduce as to compute.
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
    """Shards of data parallelism and of the pipelines' microbatches; the rest is fitted."""
    config = search_config.profile_config()
    if has_gpu:
        return config
    shards = {1, 2, n_ranks, 4 * n_ranks}
    return dataclasses.replace(
        config, shards=tuple(sorted(shards)), time_budget_s=0.2, min_samples=6, rounds=6, warm_up=1
    )


def _first_looks(*, has_gpu: bool) -> tuple[MatmulConfig, LinksConfig]:
    """Devices and links; short on CPUs, where the whole comparison should take minutes."""
    if has_gpu:
        return MatmulConfig(), LinksConfig()
    # Of all sizes: planning builds on no less, and would measure them again.
    return MatmulConfig(time_budget_s=0.3, distributed_samples=3), LinksConfig(time_budget_s=0.05)


def comparison(*, has_gpu: bool, n_ranks: int) -> list[tuple[str, Any]]:
    """Workloads with their configurations, in order; on one rank all strategies are `single`."""
    training = _training(has_gpu=has_gpu)
    searched = dataclasses.replace(training, strategy=("searched",), repeats=1)
    search_config = search_config_of(train_cases(searched, n_ranks)[0])
    if n_ranks == 1:
        unsearched = TrainConfig.search_seconds
        training = dataclasses.replace(training, strategy=("single",), search_seconds=unsearched)
    matmul, links = _first_looks(has_gpu=has_gpu)
    return [
        ("matmul", matmul),
        ("links", links),
        ("profile", _profile(search_config, n_ranks, has_gpu=has_gpu)),
        ("search", search_config),
        ("train", training),
    ]

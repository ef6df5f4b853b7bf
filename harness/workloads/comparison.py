"""The comparison that `./entry.sh` runs when no workload is named.

How fast are the devices and the links, and what does spreading training over them gain? One
model, the same global batch on one device and data parallel on all, each repeated.
"""

from __future__ import annotations

from typing import Any

from harness.workloads.links import LinksConfig
from harness.workloads.matmul import MatmulConfig
from harness.workloads.train_config import TrainConfig

_STRATEGIES = ("single", "ddp")
_N_REPEATS = 3


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
        )
    return TrainConfig(
        model="resnet18",
        image_size=64,
        n_classes=10,
        strategy=_STRATEGIES,
        batch_size=(40,),
        steps=8,
        warm_up=2,
        no_sync_steps=4,
        repeats=_N_REPEATS,
    )


def comparison(*, has_gpu: bool) -> list[tuple[str, Any]]:
    """Workloads with their configurations, in order."""
    return [
        ("matmul", MatmulConfig()),
        ("links", LinksConfig()),
        ("train", _training(has_gpu=has_gpu)),
    ]

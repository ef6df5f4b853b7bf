"""LeNet on real handwritten digits: the 8 x 8 images of scikit-learn, made twice as large."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from equivalence_models import OwnPrecisionTask
from equivalence_reference import accumulate
from equivalence_training import own_part
from sklearn.datasets import load_digits
from torch import Tensor, nn

from harness.domain.graph import Graph
from harness.domain.strategy import Strategy
from harness.measure.clock import HostClock
from harness.measure.recorder import Recorder
from harness.runtime.capture.capture import capture
from harness.runtime.data.batch import Batch
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models.lenet import LeNet
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.ranks.world import World

BATCH = 48
N_EPOCHS = 8
_N_TRAINED = 1440
_OPTIMIZER = OptimizerOptions(name="sgd", learning_rate=0.03, momentum=0.9)


def digits_task() -> Task:
    torch.manual_seed(0)
    spec = InputSpec(name="images", shape=(1, 16, 16), dtype=torch.float64)
    model = LeNet(10, 1, 16).double()
    return OwnPrecisionTask(model=model, inputs=(spec,), n_classes=10)


def digits_graph() -> Graph:
    return capture(digits_task(), BATCH, "lenet on digits").graph


@cache
def _digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.from_numpy(pixels[order]).reshape(-1, 1, 8, 8) / 4 - 1
    larger = F.interpolate(images, scale_factor=2, mode="bilinear")
    return larger, torch.from_numpy(labels[order]).long()


def _batches() -> list[Batch]:
    images, labels = _digits()
    return [
        Batch((images[i : i + BATCH],), labels[i : i + BATCH])
        for _ in range(N_EPOCHS)
        for i in range(0, _N_TRAINED, BATCH)
    ]


def predicted(model: nn.Module) -> Tensor:
    """Classes of the test images."""
    with torch.no_grad():
        found: Tensor = model.eval()(_digits()[0][_N_TRAINED:]).argmax(dim=1)
    return found


def accuracy(classes: Tensor) -> float:
    """Share of the test images that are classified rightly."""
    return float((classes == _digits()[1][_N_TRAINED:]).double().mean())


def learn_alone() -> Tensor:
    """Train on one device in plain PyTorch; the predicted classes."""
    task = digits_task()
    optimizer = make_optimizer(task.model, _OPTIMIZER, torch.device("cpu"))
    for batch in _batches():
        optimizer.zero_grad()
        accumulate(task, batch, [BATCH])
        optimizer.step()
    return predicted(task.model)


def learn_digits(strategy: Strategy, world: World) -> Tensor:
    """Train by a strategy; the predicted classes."""
    options = EngineOptions(dtype="fp32", optimizer=_OPTIMIZER, batch=BATCH)
    plan = ExecutorPlan(strategy=strategy)
    engine = ExecutorEngine(digits_task(), world, Recorder(HostClock()), options, plan)
    share = Share(n_local=len(engine.samples), n_global=BATCH)
    for batch in _batches():
        part = own_part(batch, engine.samples)
        engine.step(lambda part=part: part, share)  # type: ignore[misc]
    engine.verify_replicas()
    model = digits_task().model
    model.load_state_dict(engine.full_state()["model"])
    return predicted(model)

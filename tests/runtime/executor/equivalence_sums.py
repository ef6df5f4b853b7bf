"""A model whose layers follow one another without anything between, as sums need them."""

from __future__ import annotations

import torch
from equivalence_cases import DTYPES, Case
from equivalence_models import OwnPrecisionTask
from torch import nn

from harness.domain.partition import SAMPLE
from harness.domain.sharding import CONTRACTION, has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.runtime.capture.capture import capture
from harness.runtime.models.task import InputSpec, Task

N_CLASSES = 5


def towers(dtype: torch.dtype = torch.float32) -> Task:
    """Two pairs of a wide and a narrow layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 8),
        nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, N_CLASSES),
    )  # fmt: skip
    spec = InputSpec(name="x", shape=(7,), dtype=dtype)
    return OwnPrecisionTask(model=model.to(dtype), inputs=(spec,), n_classes=N_CLASSES)


class SumsCase(Case, frozen=True, kw_only=True):
    """A case of this model."""

    def make_task(self) -> Task:
        return towers(DTYPES[self.dtype])


def by_sums(n_devices: int, batch: int, n_microbatches: int = 1, *, loss: str = SAMPLE) -> Strategy:
    """Wide layers by features, narrow ones by contraction, the loss by samples or by all."""
    dims = iter(["feature", "feature", CONTRACTION] * 2 + [loss])
    plans = {
        operator.name: OperatorPlan({next(dims): n_devices}, list(range(n_devices)))
        for operator in capture(towers(), batch, "towers").graph.operators
        if has_tasks(operator)
    }
    return Strategy(name="sums", batch=batch, operators=plans, n_microbatches=n_microbatches)

"""Models that torch.fx cannot trace, so that overloads such as aten.relu_.default are what runs."""

from __future__ import annotations

import torch
from equivalence_cases import DTYPES, Case
from equivalence_models import OwnPrecisionTask
from torch import Tensor, nn

from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.runtime.models.task import InputSpec, Task

_IMAGE = (2, 5, 5)
_N_CLASSES = 3


class Branching(nn.Module):
    """A convolution and what works in place on its output, behind a branch on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(2, 2, 3), nn.ReLU(inplace=True)
        self.classify = nn.Linear(18, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 0:
            x = self.conv(x)
        x += 1
        x = x + self.relu(x)  # of which both are the changed one
        found: Tensor = self.classify(x.flatten(1))
        return found


class ExportedCase(Case, frozen=True, kw_only=True):
    """A case of this model."""

    def make_task(self) -> Task:
        torch.manual_seed(0)
        dtype = DTYPES[self.dtype]
        spec = InputSpec(name="x", shape=_IMAGE, dtype=dtype)
        return OwnPrecisionTask(model=Branching().to(dtype), inputs=(spec,), n_classes=_N_CLASSES)


def cut_before_what_works_in_place() -> ExportedCase:
    """The convolution on device 0, what works in place on what it sends on device 1."""
    stage_of = {"conv": 0, "add_": 1, "relu": 1, "add": 1, "flatten": 1, "classify": 1}
    stage_of["loss"] = 1
    strategy = Strategy(
        name="cut before add_",
        batch=8,
        operators={name: OperatorPlan({}, [s], s) for name, s in stage_of.items()},
        n_microbatches=2,
        stages=[Stage()] * 2,
    )
    return ExportedCase(name=strategy.name, model="branching", n_ranks=2, strategy=strategy)

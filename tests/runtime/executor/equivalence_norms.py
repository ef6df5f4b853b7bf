"""Models whose batch norms meet what the others do not have, and what their ranks run."""

from __future__ import annotations

from unittest import mock

import torch
from equivalence_cases import DTYPES, Case
from equivalence_models import OwnPrecisionTask
from equivalence_reference import Trace
from equivalence_training import make_engine, train_by_strategy
from torch import Tensor, nn

from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.runtime.capture.capture import capture
from harness.runtime.executor.gradients.counts import backward_calls
from harness.runtime.executor.gradients.deferred import Joining
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.ranks.world import World

WIDE = 512


class WideHead(nn.Module):
    """The last weights fill a bucket, which starts before the norm's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDE, 1)
        self.norm = nn.BatchNorm2d(WIDE)
        self.head = nn.Conv2d(WIDE, WIDE, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x))).mean(dim=(2, 3))


class UnreadRow(nn.Module):
    """Of the norm's 7 rows the pool reads 6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.norm(self.stem(x))).flatten(1))


_MODELS = {"wide head": (WideHead, 2, WIDE), "unread row": (UnreadRow, 7, 5)}


class NormsCase(Case, frozen=True, kw_only=True):
    """A case of one of these models."""

    def make_task(self) -> Task:
        return norms_task(self.model, DTYPES[self.dtype])


def norms_task(name: str, dtype: torch.dtype = torch.float64) -> Task:
    make, rows, n_classes = _MODELS[name]
    torch.manual_seed(0)
    spec = InputSpec(name="x", shape=(3, rows, rows), dtype=dtype)
    return OwnPrecisionTask(model=make().to(dtype), inputs=(spec,), n_classes=n_classes)


def norms_case(
    model: str,
    plans: dict[str, OperatorPlan],
    batch: int,
    *,
    others: OperatorPlan | None = None,
    **flow: object,
) -> NormsCase:
    """A case on two ranks; operators without a plan have that of `others`, or are on device 0."""
    others = others or OperatorPlan({}, [0])
    graph = capture(norms_task(model), batch, model).graph
    placed = {op.name: plans.get(op.name, others) for op in graph.operators if has_tasks(op)}
    strategy = Strategy(name=model, batch=batch, operators=placed, **flow)  # type: ignore[arg-type]
    return NormsCase(name=model, model=model, n_ranks=2, strategy=strategy)


def joined_parameters(case: Case, world: World) -> int:
    """Of how many parameters this rank joins the microbatches."""
    engine = make_engine(case, case.make_task(), world)
    modules = [
        segment.module
        for program, _ in engine._programs.values()
        for segments in program.stages.values()
        for segment in segments
    ]
    return sum(len(backward_calls(module).joined) for module in modules)


def train_joined_on_rank_1(case: Case, world: World) -> Trace:
    """Train a case whose microbatches are joined on one rank alone."""
    with mock.patch.object(Joining, "includes", return_value=world.rank == 1):
        return train_by_strategy(case, world)

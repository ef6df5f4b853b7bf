"""The part of a model that is run at a time while its operators are timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from harness.domain.graph import Graph
from harness.runtime.profiling.subgraph import Step, Subgraph, values_at


def is_microbatch(graph: Graph, samples: int, n_devices: int) -> bool:
    """Whether `samples` are fewer than one device's part of the batch."""
    assert graph.batch is not None, "a captured graph has a batch"
    return samples < graph.batch // n_devices


def stage_bounds(steps: Sequence[Step], graph: Graph, n_stages: int) -> list[tuple[int, int]]:
    """Cut a model's steps into stages of similar FLOPs; returns (begin, end) of each."""
    flops = {op.name: max(op.forward_flops + op.backward_flops, 1.0) for op in graph.operators}
    step_flops = [flops.get(step.name, 0.0) for step in steps]
    total, passed = sum(step_flops), 0.0
    stages: list[int] = []
    for one in step_flops:
        stages.append(min(n_stages - 1, int(n_stages * (passed + one / 2) / total)))
        passed += one
    begins = [k for k, stage in enumerate(stages) if k == 0 or stage != stages[k - 1]]
    return list(zip(begins, [*begins[1:], len(steps)], strict=True))


@dataclass(frozen=True)
class ModelPart:
    """Consecutive steps of a model, with the model's inputs.

    Attributes:
        n_in_flight: number of microbatches between forward and backward at a time.
        is_added: whether gradients of weights are added to those of earlier microbatches.
    """

    steps: list[Step]
    fed: dict[fx.Node, Tensor]
    begin: int
    end: int
    n_in_flight: int
    is_added: bool

    @property
    def n_steps(self) -> int:
        return self.end - self.begin

    @property
    def names(self) -> set[str]:
        return {step.name for step in self.steps[self.begin : self.end]}

    def cut(self, begin: int, end: int) -> ModelPart:
        return replace(self, begin=begin, end=end)

    def halves(self) -> tuple[ModelPart, ModelPart]:
        middle = (self.begin + self.end) // 2
        return self.cut(self.begin, middle), self.cut(middle, self.end)

    def subgraph(self) -> Subgraph:
        """Make the subgraph of these steps, with inputs computed by the steps before them."""
        inputs = values_at(self.steps, self.begin, self.fed)
        later = {node for step in self.steps[self.end :] for node in step.reads}
        return Subgraph(self.steps[self.begin : self.end], inputs, later)

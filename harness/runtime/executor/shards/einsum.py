"""Shards of an einsum: a block of its result, or a partial sum over some of a summed dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from harness.domain.einsum import equation_of
from harness.domain.partition import Interval
from harness.runtime.executor.shards.base import Given, Held, Shard, ShardSpec
from harness.runtime.executor.shards.regions import Region, regions


class EinsumShard(Shard):
    """An einsum of regions of its inputs and slices of the model's tensors.

    Args:
        operands: inputs and tensors of the model, in order.
        intervals: of the dims that the block cuts, by letter.
        inward: one region per input.
    """

    def __init__(
        self,
        part: ShardSpec,
        equation: str,
        operands: dict[Given | Held, str],
        intervals: dict[str, Interval],
        inward: list[Region],
    ) -> None:
        super().__init__()
        self._equation, self._operands, self._inward = equation, list(operands), inward
        for k, (operand, letters) in enumerate(operands.items()):
            if isinstance(operand, Held):
                sizes = part.tensor(operand).shape
                cut = [intervals.get(x, (0, n)) for x, n in zip(letters, sizes, strict=True)]
                self.copy_slice(part, f"operand_{k}", operand, cut)

    def forward(self, *inputs: Tensor) -> Tensor:
        operands = [
            getattr(self, f"operand_{k}")
            if isinstance(operand, Held)
            else self._inward[operand.index].take(inputs[operand.index])
            for k, operand in enumerate(self._operands)
        ]
        return torch.einsum(self._equation, *operands)


def make_einsum(part: ShardSpec) -> EinsumShard | None:
    """An einsum, or a product by a stack of weights, cut along any dims."""
    equation, read = equation_of(part.operator), part.arguments()
    if equation is None or read is None:
        return None
    found: list[Given | Held] = []

    def note(argument: Any) -> Any:
        if isinstance(argument, Given | Held):
            found.append(argument)
        return argument

    fx.node.map_aggregate(read, note)
    operands = dict(zip(found, equation.operands, strict=True))
    if len(operands) < len(found):
        return None  # because one weight is two operands
    intervals = dict(zip(equation.result, part.output, strict=True))
    summed = part.partial("contraction")
    if summed is not None:
        intervals[str(part.operator.attrs["summed"])] = summed
    needed = [
        [intervals.get(x, (0, n)) for x, n in zip(letters, wanted.shape.values(), strict=True)]
        for letters, wanted in zip(equation.inputs, part.wanted, strict=True)
    ]
    inward = regions(part, needed)
    if inward is None:
        return None
    return EinsumShard(part, equation.plain, operands, intervals, inward)

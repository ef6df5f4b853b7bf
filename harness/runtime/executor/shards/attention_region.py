"""Shards of an attention that was joined with its projections: a partial sum over some groups."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.domain.partition import SAMPLE, Interval
from harness.runtime.executor.shards.base import Given, Held, Shard, ShardSpec
from harness.runtime.executor.shards.regions import Region, regions
from harness.runtime.tracing.attention_region import AttentionRegion, RegionWeight


class RegionShard(Shard):
    """Some groups of heads over whole sequences.

    Args:
        groups: the block's groups; the part with group 0 adds the output's bias.
        inward: one region per input.
    """

    def __init__(
        self,
        part: ShardSpec,
        joined: AttentionRegion,
        held: list[Held],
        groups: Interval,
        inward: list[Region],
    ) -> None:
        super().__init__()
        self._compute, self._inward = joined.part(groups), inward
        self._dims = [rule.dim for rule in joined.weights]
        self._names: list[list[str]] = []
        for number, (rule, tensor) in enumerate(zip(joined.weights, held, strict=True)):
            self._copy(part, f"weight_{number}", rule, tensor, joined.n_groups, groups)

    def _copy(
        self,
        part: ShardSpec,
        name: str,
        rule: RegionWeight,
        tensor: Held,
        n_groups: int,
        groups: Interval,
    ) -> None:
        whole = part.tensor(tensor)
        if rule.is_last_bias and groups[0]:
            self._names.append([])
            return
        if rule.dim is None:
            self._names.append([name])
            if isinstance(whole, torch.nn.Parameter):
                self.copy_slice(part, name, tensor)
            else:
                self.register_buffer(name, whole.detach(), persistent=False)
            return
        sizes = [(0, size) for size in whole.shape]
        intervals = rule.intervals(groups, n_groups)
        self._names.append([f"{name}_{k}" for k in range(len(intervals))])
        for one, interval in zip(self._names[-1], intervals, strict=True):
            self.copy_slice(
                part, one, tensor, [*sizes[: rule.dim], interval, *sizes[rule.dim + 1 :]]
            )

    def forward(self, *inputs: Tensor) -> Tensor:
        taken = [each.take(x) for each, x in zip(self._inward, inputs, strict=True)]
        weights = map(self._weight, self._names, self._dims)
        found: Tensor = self._compute(*taken, *weights)
        return found

    def _weight(self, names: list[str], dim: int | None) -> Tensor | None:
        pieces = [getattr(self, name) for name in names]
        if len(pieces) < 2:
            return pieces[0] if pieces else None
        return torch.cat(pieces, dim=dim or 0)


def make_attention_region(part: ShardSpec) -> RegionShard | None:
    """An AttentionRegion, cut along groups of heads."""
    joined, groups, read = part.node.target, part.partial("heads"), part.arguments()
    if not isinstance(joined, AttentionRegion) or groups is None or read is None:
        return None
    if len(part.output) != 3 or not (part.is_whole(1) and part.is_whole(2)):
        return None
    held = [each for each in read[0] if isinstance(each, Held)]
    given = [each.index for each in read[0] if isinstance(each, Given)]
    if given != list(range(joined.n_inputs)) or len(held) != len(joined.weights):
        return None
    needed = [
        [part.output[0] if dim == SAMPLE else (0, size) for dim, size in wanted.shape.items()]
        for wanted in part.wanted
    ]
    inward = regions(part, needed)
    if inward is None:
        return None
    return RegionShard(part, joined, held, groups, inward)

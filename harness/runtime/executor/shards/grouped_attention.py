"""Shards of GroupedAttention: a partial sum over some groups of heads, for some queries."""

from __future__ import annotations

from torch import Tensor

from harness.domain.partition import Interval
from harness.runtime.executor.shards.base import Shard, ShardSpec
from harness.runtime.executor.shards.regions import Region, region
from harness.runtime.models.attention import AttentionForm, GroupedAttention, Projections, attend


class GroupedAttentionShard(Shard):
    """Some heads for some queries over the whole memory.

    Args:
        groups: the block's groups of heads; the part with group 0 adds the output's bias.
        first: position of the block's first query.
        inward: one region per input.
    """

    def __init__(
        self,
        part: ShardSpec,
        form: AttentionForm,
        groups: Interval,
        first: int,
        inward: list[Region],
    ) -> None:
        super().__init__()
        self._form, self._first, self._inward = form, first, inward
        heads = groups[0] * form.queries_per_group, groups[1] * form.queries_per_group
        wide = heads[0] * form.head_dim, heads[1] * form.head_dim
        narrow = groups[0] * form.head_dim, groups[1] * form.head_dim
        for name, rows in (("query", wide), ("key", narrow), ("value", narrow)):
            weight = part.held(f"{name}.weight")
            assert weight is not None
            width = (0, part.tensor(weight).shape[1])
            self.copy_slice(part, name, weight, (rows, width))
            self.copy_slice(part, f"{name}_bias", part.held(f"{name}.bias"), (rows,))
        width = part.output[2]
        self.copy_slice(part, "out", part.held("out.weight"), (width, wide))
        bias = part.held("out.bias") if groups[0] == 0 else None
        self.copy_slice(part, "out_bias", bias, (width,))
        table = part.held("relative.weight")
        n_buckets = 0 if table is None else part.tensor(table).shape[0]
        self.copy_slice(part, "bias_table", table, ((0, n_buckets), heads))

    def forward(self, *inputs: Tensor) -> Tensor:
        taken = [each.take(x) for each, x in zip(self._inward, inputs, strict=True)]
        weights = Projections(*(getattr(self, name) for name in Projections._fields))
        return attend(self._form, weights, *taken, first=self._first)


def make_grouped_attention(part: ShardSpec) -> GroupedAttentionShard | None:
    """GroupedAttention, cut along groups of heads and queries."""
    module, groups = part.module, part.partial("heads")
    if not isinstance(module, GroupedAttention) or groups is None:
        return None
    if len(part.output) != 3 or not part.is_whole(2):
        return None
    regions: list[Region] = []
    for index, wanted in enumerate(part.wanted):
        whole = [(0, size) for size in wanted.shape.values()]
        needed = [part.output[0], part.output[1] if index == 0 else whole[1], *whole[2:]]
        found = region(wanted, needed)
        if found is None:
            return None
        regions.append(found)
    return GroupedAttentionShard(part, module.form, groups, part.output[1][0], regions)

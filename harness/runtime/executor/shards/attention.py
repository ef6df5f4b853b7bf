"""Shards of attention: a partial sum over some heads, or groups of heads, for some queries."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from harness.domain.key_forms import POSITIONS
from harness.domain.partition import SAMPLE, Interval
from harness.runtime.executor.shards.base import Given, Held, Shard, ShardSpec
from harness.runtime.executor.shards.regions import Region
from harness.runtime.models.attention import (
    AttentionForm,
    GroupedAttention,
    Mix,
    Projections,
    attend,
    mix_values,
    split_heads,
)
from harness.runtime.tracing.attention_region import AttentionRegion, OwnPositions, RegionWeight


class MixingShard(Shard):
    """A part of an attention.

    Attributes:
        mix: mixes values; replaced where devices give each other keys and values.
    """

    def __init__(self, inward: list[Region]) -> None:
        super().__init__(inward)
        self.mix: Mix = mix_values


class GroupedAttentionShard(MixingShard):
    """Some heads for some queries over the whole memory.

    Args:
        groups: the block's groups of heads; the part with group 0 adds the output's bias.
        first, first_key: positions of the block's first query and first key.
    """

    def __init__(
        self,
        part: ShardSpec,
        form: AttentionForm,
        groups: Interval,
        first: int,
        first_key: int,
        inward: list[Region],
    ) -> None:
        super().__init__(inward)
        self._form, self._first, self._first_key = form, first, first_key
        heads = groups[0] * form.queries_per_group, groups[1] * form.queries_per_group
        wide = heads[0] * form.head_dim, heads[1] * form.head_dim
        narrow = groups[0] * form.head_dim, groups[1] * form.head_dim
        for name, rows in (("query", wide), ("key", narrow), ("value", narrow)):
            self.copy_slice(part, name, part.held(f"{name}.weight"), (rows,))
            self.copy_slice(part, f"{name}_bias", part.held(f"{name}.bias"), (rows,))
        width = part.output[2]
        self.copy_slice(part, "out", part.held("out.weight"), (width, wide))
        bias = part.held("out.bias") if groups[0] == 0 else None
        self.copy_slice(part, "out_bias", bias, (width,))
        table = part.held("relative.weight")
        n_buckets = 0 if table is None else part.tensor(table).shape[0]
        self.copy_slice(part, "bias_table", table, ((0, n_buckets), heads))

    def compute(self, *inputs: Tensor) -> Tensor:
        weights = Projections(*(getattr(self, name) for name in Projections._fields))
        first, first_key = self._first, self._first_key
        return attend(self._form, weights, *inputs, first=first, first_key=first_key, mix=self.mix)


def make_grouped_attention(part: ShardSpec) -> GroupedAttentionShard | None:
    """GroupedAttention, cut along groups of heads and queries."""
    module, groups = part.module, part.partial("heads")
    if not isinstance(module, GroupedAttention) or groups is None:
        return None
    first = part.output[1][0]
    first_key = first if part.has_own_keys else 0
    inward = _regions(part, {0, 1} if part.has_own_keys else {0})
    return GroupedAttentionShard(part, module.form, groups, first, first_key, inward)


def _regions(part: ShardSpec, own: Collection[int]) -> list[Region]:
    """The regions of inputs (samples, positions, ...) of which `own` are needed for the block's
    positions alone."""
    needed: list[list[Interval]] = []
    for index, wanted in enumerate(part.wanted):
        _, *others = ((0, size) for size in wanted.shape.values())
        if index in own:
            others[0] = part.output[1]
        needed.append([part.output[0], *others])
    return part.regions(needed)


_ROLES = ("query", "key", "value")


class AttentionShard(MixingShard):
    """Some heads of an attention for some queries over whole sequences of keys and values.

    Args:
        heads: the block's heads; the part with head 0 adds the output's bias.
        roles: indices of the inputs that are query, key and value.
    """

    out_weight: nn.Parameter
    out_bias: nn.Parameter | None

    def __init__(
        self,
        part: ShardSpec,
        module: nn.MultiheadAttention,
        heads: Interval,
        roles: tuple[int, ...],
        inward: list[Region],
    ) -> None:
        super().__init__(inward)
        self._head_dim, self._dropout, self._roles = module.head_dim, module.dropout, roles
        columns = heads[0] * module.head_dim, heads[1] * module.head_dim
        for position, role in enumerate(_ROLES):
            shift = position * module.embed_dim
            stacked = columns[0] + shift, columns[1] + shift
            self.copy_slice(part, f"{role}_bias", part.held("in_proj_bias"), (stacked,))
            weight, rows = part.held("in_proj_weight"), stacked
            if weight is None:
                weight, rows = part.held(f"{role[0]}_proj_weight"), columns
            self.copy_slice(part, f"{role}_weight", weight, (rows,))
        width = (0, module.embed_dim)
        self.copy_slice(part, "out_weight", part.held("out_proj.weight"), (width, columns))
        bias = part.held("out_proj.bias") if heads[0] == 0 else None
        self.copy_slice(part, "out_bias", bias, (width,))

    def compute(self, *inputs: Tensor) -> Tensor:
        query, key, value = (
            split_heads(
                inputs[source],
                getattr(self, f"{role}_weight"),
                getattr(self, f"{role}_bias"),
                self._head_dim,
            )
            for role, source in zip(_ROLES, self._roles, strict=True)
        )
        dropout = self._dropout if self.training else 0.0
        form = AttentionForm(head_dim=self._head_dim, dropout=dropout)
        mixed = self.mix(form, query, key, value, None, None, 0)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out_weight, self.out_bias)


def make_attention(part: ShardSpec) -> AttentionShard | None:
    """nn.MultiheadAttention over whole sequences without masks, cut along heads and queries."""
    module = part.module
    if not isinstance(module, nn.MultiheadAttention) or not module.batch_first:
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return None
    roles = _roles(part, module)
    heads = part.partial("heads")
    if roles is None or heads is None or not _has_unread_weights(part.node):
        return None
    inward = _regions(part, roles if part.has_own_keys else roles[:1])
    return AttentionShard(part, module, heads, roles, inward)


def _roles(part: ShardSpec, module: nn.MultiheadAttention) -> tuple[int, ...] | None:
    """Indices of the inputs that are query, key and value; None for a masked attention."""
    read = part.arguments()
    if read is None or len(part.wanted) != len(_ROLES):
        return None
    bound: dict[str, Any] = inspect.signature(module.forward).bind(*read[0], **read[1]).arguments
    masks = (bound.get(name) for name in ("key_padding_mask", "attn_mask"))
    if any(mask is not None for mask in masks) or bound.get("is_causal"):
        return None
    sources = [bound.get(role) for role in _ROLES]
    found = tuple(source.index for source in sources if isinstance(source, Given))
    return found if len(found) == len(_ROLES) else None


def _has_unread_weights(node: fx.Node) -> bool:
    """Whether no node reads the attention weights, which shards do not compute."""
    return all(
        user.op == "call_function" and len(user.args) == 2 and (user.args[1] == 0 or not user.users)
        for user in node.users
    )


class RegionShard(MixingShard):
    """Some groups of heads for some queries.

    Args:
        groups: the block's groups; the part with group 0 adds the output's bias.
        rows: the block's positions; None if it has all.
    """

    def __init__(
        self,
        part: ShardSpec,
        joined: AttentionRegion,
        held: list[Held],
        groups: Interval,
        rows: OwnPositions | None,
        inward: list[Region],
    ) -> None:
        super().__init__(inward)
        self._compute_part = joined.part(groups, rows)
        self._first = None if rows is None else rows.interval[0]
        mixing = joined.positions and joined.positions.mixing
        self._form = AttentionForm(head_dim=0) if mixing is None else mixing.form
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
            self.copy_slice(part, name, tensor)
            return
        before = [(0, size) for size in whole.shape[: rule.dim]]
        intervals = rule.intervals(groups, n_groups)
        self._names.append([f"{name}_{k}" for k in range(len(intervals))])
        for own_name, interval in zip(self._names[-1], intervals, strict=True):
            self.copy_slice(part, own_name, tensor, [*before, interval])

    def compute(self, *inputs: Tensor) -> Tensor:
        weights = map(self._weight, self._names, self._dims)
        mix = () if self._first is None else (self._mix,)
        found: Tensor = self._compute_part(*inputs, *weights, *mix)
        return found

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:  # what it hides does not count at all
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        assert self._first is not None
        return self.mix(self._form, q, k, v, None, mask, self._first)

    def _weight(self, names: list[str], dim: int | None) -> Tensor | None:
        pieces = [getattr(self, name) for name in names]
        if len(pieces) < 2:
            return pieces[0] if pieces else None
        return torch.cat(pieces, dim=dim or 0)


def make_attention_region(part: ShardSpec) -> RegionShard | None:
    """An AttentionRegion, cut along groups of heads and queries."""
    joined, groups, read = part.node.target, part.partial("heads"), part.arguments()
    if not isinstance(joined, AttentionRegion) or groups is None or read is None:
        return None
    rows = None if part.is_whole(1) else OwnPositions(part.output[1], part.has_own_keys)
    positions = joined.positions
    if rows is not None and (positions is None or (rows.has_own_keys and not positions.mixing)):
        return None
    held = [each for each in read[0] if isinstance(each, Held)]
    given = [each.index for each in read[0] if isinstance(each, Given)]
    if given != list(range(joined.n_inputs)) or len(held) != len(joined.weights):
        return None
    needed: list[list[Interval]] = []
    for index, wanted in enumerate(part.wanted):
        reads = positions.reads[index] if rows is not None and positions else "whole"
        is_own = reads == "rows" or (reads == "keys" and part.has_own_keys)
        if is_own and wanted.shape.get(POSITIONS) != part.sizes[1]:
            return None
        cut = {SAMPLE: part.output[0], **({POSITIONS: part.output[1]} if is_own else {})}
        needed.append([cut.get(dim, (0, size)) for dim, size in wanted.shape.items()])
    return RegionShard(part, joined, held, groups, rows, part.regions(needed))


def make_any_attention(part: ShardSpec) -> MixingShard | None:
    """An attention of any kind with outputs (samples, positions, features), cut along the first two
    and along heads."""
    if len(part.output) != 3 or not part.is_whole(2):
        return None
    return make_attention_region(part) or make_grouped_attention(part) or make_attention(part)

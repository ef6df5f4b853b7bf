"""Shards of attention: a partial sum over some heads, or groups of heads, for some queries."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
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


# A tensor of the model, and the intervals of its first dims.
Slice = tuple[Held | None, *tuple[Interval, ...]]


class AttentionShard(MixingShard):
    """Some heads, or groups of heads, for some queries over the whole memory.

    Args:
        slices: those of the `Projections`, by name; without the others.
        first, first_key: positions of the block's first query and first key.
        roles: indices of the inputs that are query, key and value; None: queries, memory, mask.
    """

    def __init__(
        self,
        part: ShardSpec,
        form: AttentionForm,
        slices: Mapping[str, Slice],
        inward: list[Region],
        *,
        first: int = 0,
        first_key: int = 0,
        roles: Sequence[int] | None = None,
    ) -> None:
        super().__init__(inward)
        self._form, self._first, self._first_key = form, first, first_key
        self._roles = roles
        for name in Projections._fields:
            held, *intervals = slices.get(name, (None,))
            self.copy_slice(part, name, held, intervals)

    def compute(self, *inputs: Tensor) -> Tensor:
        weights = Projections(*(getattr(self, name) for name in Projections._fields))
        form = self._form if self.training else replace(self._form, dropout=0.0)
        values: Tensor | None = None
        if self._roles is not None:
            queries, keys, values = (inputs[k] for k in self._roles)
            inputs = queries, keys
        return attend(
            form, weights, *inputs, values=values, first=self._first, first_key=self._first_key,
            mix=self.mix,
        )  # fmt: skip


def make_grouped_attention(part: ShardSpec) -> AttentionShard | None:
    """GroupedAttention, cut along groups of heads and queries; the part with group 0 adds the
    output's bias."""
    module, groups = part.module, part.partial("heads")
    if not isinstance(module, GroupedAttention) or groups is None:
        return None
    form, width = module.form, part.output[2]
    heads = groups[0] * form.queries_per_group, groups[1] * form.queries_per_group
    wide = heads[0] * form.head_dim, heads[1] * form.head_dim
    narrow = groups[0] * form.head_dim, groups[1] * form.head_dim
    slices: dict[str, Slice] = {"out": (part.held("out.weight"), width, wide)}
    for name, rows in (("query", wide), ("key", narrow), ("value", narrow)):
        slices[name] = part.held(f"{name}.weight"), rows
        slices[f"{name}_bias"] = part.held(f"{name}.bias"), rows
    if groups[0] == 0:
        slices["out_bias"] = part.held("out.bias"), width
    if (table := part.held("relative.weight")) is not None:
        slices["bias_table"] = table, (0, part.tensor(table).shape[0]), heads
    first = part.output[1][0]
    first_key = first if part.has_own_keys else 0
    inward = _regions(part, {0, 1} if part.has_own_keys else {0})
    return AttentionShard(part, form, slices, inward, first=first, first_key=first_key)


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


def make_attention(part: ShardSpec) -> AttentionShard | None:
    """nn.MultiheadAttention over whole sequences without masks, cut along heads and queries; the
    part with head 0 adds the output's bias."""
    module = part.module
    if not isinstance(module, nn.MultiheadAttention) or not module.batch_first:
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return None
    roles = _roles(part, module)
    heads = part.partial("heads")
    if roles is None or heads is None or not _has_unread_weights(part.node):
        return None
    columns, width = (heads[0] * module.head_dim, heads[1] * module.head_dim), (0, module.embed_dim)
    slices: dict[str, Slice] = {"out": (part.held("out_proj.weight"), width, columns)}
    if heads[0] == 0:
        slices["out_bias"] = part.held("out_proj.bias"), width
    joined = part.held("in_proj_weight")
    for position, role in enumerate(_ROLES):
        shift = position * module.embed_dim
        stacked = columns[0] + shift, columns[1] + shift
        own = part.held(f"{role[0]}_proj_weight")
        slices[role] = (own, columns) if joined is None else (joined, stacked)
        slices[f"{role}_bias"] = part.held("in_proj_bias"), stacked
    form = AttentionForm(head_dim=module.head_dim, dropout=module.dropout)
    inward = _regions(part, roles if part.has_own_keys else roles[:1])
    return AttentionShard(part, form, slices, inward, roles=roles)


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

"""Multi-head attention with grouped queries, rotary or relative positions and masks, in one module.

It is one operator of a graph, so that it can be cut by heads and by queries (`AttentionShard`).

Sources: Vaswani et al., 2017; Su et al., "RoFormer", 2021 (rotary positions); Raffel et al., 2020
(buckets of relative positions); Ainslie et al., "GQA", 2023 (grouped queries).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Relative positions from here on share the last bucket.
_FARTHEST = 128


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """The computation of an attention, apart from its weights and its number of heads.

    Attributes:
        queries_per_group: query heads that share a head of keys and values.
        scale: of scores; None: head_dim ** -0.5.
        dropout: probability of dropping a weight of a value.
        rotary_base: base of the rotary positions' wavelengths; None without them.
    """

    head_dim: int
    queries_per_group: int = 1
    is_causal: bool = False
    rotary_base: float | None = None
    scale: float | None = None
    dropout: float = 0.0


class Projections(NamedTuple):
    """Weights of an attention, of all heads or of some.

    Attributes:
        bias_table: (buckets of relative positions, query heads).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    out_bias: Tensor | None
    bias_table: Tensor | None


# Mixes the values of one block of queries: called with the form, queries (samples, heads, queries,
# features of a head), keys and values (samples, groups, positions, features), the table of relative
# positions, the mask and the position of the first query; returns the shape of the queries. The
# mask is (samples or 1, heads or 1, queries or 1, positions or 1): added to the scores, or true
# where they count.
Mix = Callable[[AttentionForm, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int], Tensor]


def attend(
    form: AttentionForm,
    weights: Projections,
    queries: Tensor,
    memory: Tensor,
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    first: int = 0,
    first_key: int = 0,
    mix: Mix | None = None,
) -> Tensor:
    """Compute the attention of the heads whose weights are given.

    Args:
        queries: (samples, queries, width).
        memory: (samples, positions, width).
        mask: (samples, positions), true where a position counts; None: all do.
        values: as `memory`, which they are projected from by default.
        first, first_key: position of the first query, and of the first one in `memory`, for causal
            masks and encoded positions.
        mix: `mix_values` by default.

    Returns:
        (samples, queries, width); the sum over parts of the heads is the whole attention.
    """
    q = split_heads(queries, weights.query, weights.query_bias, form.head_dim)
    k = split_heads(memory, weights.key, weights.key_bias, form.head_dim)
    values = memory if values is None else values
    v = split_heads(values, weights.value, weights.value_bias, form.head_dim)
    if form.rotary_base is not None:
        q = _rotated(q, form.rotary_base, first)
        k = _rotated(k, form.rotary_base, first_key)
    mask = None if mask is None else mask[:, None, None, :]
    mixed = (mix or mix_values)(form, q, k, v, weights.bias_table, mask, first)
    return F.linear(mixed.transpose(1, 2).flatten(2), weights.out, weights.out_bias)


def mix_values(
    form: AttentionForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    mask: Tensor | None,
    first: int,
) -> Tensor:
    """Mix values of all positions; see `Mix`. Later ones are left out where no query sees them."""
    if form.is_causal and mask is None:
        k, v = (x[:, :, : first + q.shape[2]] for x in (k, v))
    if form.queries_per_group > 1:
        k = k.repeat_interleave(form.queries_per_group, dim=1)
        v = v.repeat_interleave(form.queries_per_group, dim=1)
    attention = partial(
        F.scaled_dot_product_attention, q, k, v, dropout_p=form.dropout, scale=form.scale
    )
    is_plain = mask is None and table is None
    if is_plain and (not form.is_causal or (first == 0 and q.shape[2] == k.shape[2])):
        return attention(is_causal=form.is_causal)
    return attention(attn_mask=score_bias(form, table, q, k, mask, first))


def split_heads(x: Tensor, weight: Tensor, bias: Tensor | None, head_dim: int) -> Tensor:
    """Project an input; returns (samples, heads, positions, features of a head)."""
    heads: Tensor = F.linear(x, weight, bias).unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def _rotated(x: Tensor, base: float, first: int) -> Tensor:
    """Turn each pair of features by its position's angle."""
    half = x.shape[-1] // 2
    accurate = torch.promote_types(x.dtype, torch.float32)
    powers = torch.arange(half, device=x.device, dtype=accurate) / half
    positions = torch.arange(first, first + x.shape[2], device=x.device, dtype=accurate)
    angles = positions[:, None] * base**-powers
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def score_bias(
    form: AttentionForm,
    table: Tensor | None,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    first: int,
) -> Tensor:
    """The mask that is added to the scores: (samples or 1, heads or 1, queries, positions).

    Scores that a boolean mask hides are finite, so that a sample of padding alone has no undefined
    values.
    """
    if table is None and not form.is_causal and mask is not None and mask.is_floating_point():
        return mask.to(q.dtype)
    places = torch.arange(first, first + q.shape[2], device=q.device)
    distance = torch.arange(k.shape[2], device=q.device) - places[:, None]
    found = q.new_zeros(1, 1, *distance.shape)
    if table is not None:
        buckets = _buckets(distance, table.shape[0], is_causal=form.is_causal)
        found = F.embedding(buckets, table).permute(2, 0, 1)[None].to(q.dtype)
    hidden = torch.zeros_like(distance, dtype=torch.bool)[None, None]
    if form.is_causal:
        hidden = hidden | (distance > 0)
    if mask is not None and mask.is_floating_point():
        found = found + mask.to(q.dtype)
    elif mask is not None:
        hidden = hidden | ~mask
    return found.masked_fill(hidden, torch.finfo(q.dtype).min)


def _buckets(distance: Tensor, n_buckets: int, *, is_causal: bool) -> Tensor:
    """Number relative positions: near ones by themselves, far ones by their logarithm."""
    offset = torch.zeros_like(distance)
    if not is_causal:
        n_buckets //= 2
        offset = (distance > 0).to(torch.int64) * n_buckets
    far = distance.abs() if not is_causal else (-distance).clamp(min=0)
    n_near = n_buckets // 2
    scale = (n_buckets - n_near) / math.log(_FARTHEST / n_near)
    logarithmic = n_near + ((far.clamp(min=1) / n_near).log() * scale).to(torch.int64)
    return offset + torch.where(far < n_near, far, logarithmic.clamp(max=n_buckets - 1))


class GroupedAttention(nn.Module):
    """Attention over a memory; called with queries, memory and, optionally, a mask (`attend`).

    Args:
        n_groups: heads of keys and values, each shared by n_heads / n_groups query heads.
        n_buckets: buckets of learned relative positions; 0 without them.
    """

    def __init__(
        self,
        width: int,
        n_heads: int,
        *,
        n_groups: int | None = None,
        has_bias: bool = True,
        is_causal: bool = False,
        rotary_base: float | None = None,
        n_buckets: int = 0,
    ) -> None:
        super().__init__()
        self.width, self.n_groups = width, n_groups or n_heads
        head_dim = width // n_heads
        self.form = AttentionForm(
            head_dim=head_dim,
            queries_per_group=n_heads // self.n_groups,
            is_causal=is_causal,
            rotary_base=rotary_base,
        )
        narrow = self.n_groups * head_dim
        self.query = nn.Linear(width, n_heads * head_dim, bias=has_bias)
        self.key = nn.Linear(width, narrow, bias=has_bias)
        self.value = nn.Linear(width, narrow, bias=has_bias)
        self.out = nn.Linear(n_heads * head_dim, width, bias=has_bias)
        self.relative = nn.Embedding(n_buckets, n_heads) if n_buckets else None

    def forward(self, queries: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        layers = (self.query, self.key, self.value, self.out)
        table = None if self.relative is None else self.relative.weight
        weights: list[Any] = [*(x.weight for x in layers), *(x.bias for x in layers), table]
        return attend(self.form, Projections(*weights), queries, memory, mask)

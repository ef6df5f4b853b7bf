"""Attention of some queries to keys and values that other devices project (`domain.key_forms`).

A ring (Liu et al., "Ring Attention with Blockwise Transformers", 2023) keeps of all keys and values
those of its own positions only, and those that visit it:

    round 0   attend to own block     | send it to the next device
    round 1   attend to the block     | send it on         backward: its gradient follows one round
              of the device before    |                    later, and each device adds its part

The softmax over blocks has a running maximum and sum. Backward computes each block's scores again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.domain.key_forms import KeyForm
from harness.domain.partition import Interval
from harness.runtime.models.attention import AttentionForm, Mix, mix_values, score_bias

# Starts sending a tensor to the next device, and receiving one of another shape from the device
# before; the result waits for it.
Pass = Callable[[Tensor, tuple[int, ...]], Callable[[], Tensor]]

# Scores that exist at once, by type of device: 1 MiB in 32 bits, which a core's cache holds, or
# 256 MiB, so that a GPU has enough to do.
_N_SCORES = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass(frozen=True)
class KeyRing:
    """The devices that have the positions of one sequence.

    Attributes:
        blocks: positions of each device, in the order in which keys travel.
        at: place of this device.
    """

    blocks: tuple[Interval, ...]
    at: int
    start: Pass

    def place(self, n_before: int) -> int:
        """The place of a device that comes some devices before this one."""
        return (self.at - n_before) % len(self.blocks)

    def shape(self, own: Tensor, place: int) -> tuple[int, ...]:
        """Shape of the keys and values of another device, (2, samples, groups, positions, n)."""
        start, stop = self.blocks[place]
        return (*own.shape[:3], stop - start, own.shape[4])

    def around(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Places and their keys and values, own ones first; the next are received meanwhile."""
        held, n = own, len(self.blocks)
        for k in range(n):
            waiting = None
            if k + 1 < n:
                waiting = self.start(held, self.shape(own, self.place(k + 1)))
            yield self.place(k), held
            if waiting is not None:
                held = waiting()


def make_mix(keys: KeyForm, ring: KeyRing) -> Mix:
    """The mixing of values by a device that projects keys and values of its own positions."""
    gather: Callable[..., Tensor] = _Gather.apply
    mix_around: Callable[..., Tensor] = _MixAround.apply

    def mix(
        form: AttentionForm,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor | None,
        mask: Tensor | None,
        first: int,
    ) -> Tensor:
        own = torch.stack((k, v))
        if keys == "ring":
            return mix_around(q, own, table, mask, form, ring)
        k, v = gather(own, ring).unbind()
        return mix_values(form, q, k, v, table, mask, first)

    return mix


class _Gather(torch.autograd.Function):
    """Concatenate all devices' keys and values; backward sums their gradients where they belong."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ring: KeyRing) -> Tensor:
        ctx.ring = ring
        found = dict(ring.around(own))
        return torch.cat([found[place] for place in range(len(found))], dim=3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ring: KeyRing = ctx.ring
        parts = gradient.split([stop - start for start, stop in ring.blocks], dim=3)
        held = parts[ring.place(1)]
        for k in range(2, len(parts) + 1):
            place = ring.place(k)
            held = ring.start(held, ring.shape(gradient, place))() + parts[place]
        return held, None


class _MixAround(torch.autograd.Function):
    """softmax(s) v over blocks of keys, with scores s, and with g the gradient of the output o

    dL/dv = p g,  dL/ds = p (g v - g o),  p = softmax(s)
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        own: Tensor,
        table: Tensor | None,
        mask: Tensor | None,
        form: AttentionForm,
        ring: KeyRing,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        lowest = torch.finfo(wide).min  # of a query from which a mask hides all keys so far
        top = q.new_full((*q.shape[:3], 1), lowest, dtype=wide)
        total, mixed = torch.zeros_like(top), torch.zeros_like(q, dtype=wide)
        for place, (keys, values) in ring.around(own):
            for part in _parts(form, q, keys, table, mask, ring, place):
                rows = part.rows
                scores = part.scores()
                raised = torch.maximum(top[:, :, rows], scores.amax(-1, keepdim=True))
                kept = (top[:, :, rows] - raised).exp_()
                weights = (scores - raised).exp_()
                top[:, :, rows] = raised
                total[:, :, rows] = total[:, :, rows] * kept + weights.sum(-1, keepdim=True)
                added = part.times(weights, part.seen(values))
                mixed[:, :, rows] = mixed[:, :, rows] * kept + added
        total.clamp_(min=torch.finfo(wide).tiny)
        found = mixed.div_(total).to(q.dtype)
        ctx.save_for_backward(q, own, table, mask, found, top, total)
        ctx.form, ctx.ring = form, ring
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, own, table, mask, found, top, total = ctx.saved_tensors
        ring: KeyRing = ctx.ring
        along = (gradient.to(top.dtype) * found).sum(-1, keepdim=True)
        to_q = torch.zeros_like(q, dtype=top.dtype)
        to_table = None if table is None else torch.zeros_like(table)
        to_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        to_own, waiting = own, None
        for place, block in ring.around(own):
            to_block = torch.zeros_like(block, dtype=top.dtype)
            for part in _parts(ctx.form, q, block[0], table, mask, ring, place):
                rows, n = part.rows, part.n_keys
                g = gradient[:, :, rows]
                p = (part.scores() - top[:, :, rows]).exp_().div_(total[:, :, rows])
                to_block[1, :, :, :n] += part.summed(p, g)
                s = part.times(g, part.seen(block[1]).mT).sub_(along[:, :, rows]).mul_(p)
                if to_table is not None:
                    to_table += part.to_table(s)
                if to_mask is not None:
                    shown = part.of_mask(to_mask)
                    shown += s.sum_to_size(shown.shape)
                s.mul_(part.scale)
                to_q[:, :, rows] += part.times(s, part.seen(block[0]))
                to_block[0, :, :, :n] += part.summed(s, q[:, :, rows])
            to_block = to_block.to(own.dtype)
            if place == ring.at:
                to_own = to_block
                continue
            to_block = to_block if waiting is None else to_block + waiting()
            waiting = ring.start(to_block, ring.shape(own, (place - 1) % len(ring.blocks)))
        to_own = to_own if waiting is None else to_own + waiting()
        return to_q.to(q.dtype), to_own, to_table, to_mask, None, None


@dataclass(frozen=True)
class _Part:
    """Some queries, and the keys of a block that they may see.

    Attributes:
        q: all queries, (samples, heads, queries, n).
        keys: of the block, (samples, groups, positions, n).
        mask: of all keys.
        block: positions of the block.
        first: position of the first of these queries after the block's first key.
    """

    form: AttentionForm
    q: Tensor
    keys: Tensor
    table: Tensor | None
    mask: Tensor | None
    block: Interval
    rows: slice
    n_keys: int
    first: int

    @property
    def scale(self) -> float:
        return float(self.form.scale or self.form.head_dim**-0.5)

    def seen(self, x: Tensor) -> Tensor:
        """The keys or values that these queries may see."""
        return x[:, :, : self.n_keys]

    def scores(self) -> Tensor:
        """(samples, heads, queries, positions), in 32 bits at least."""
        q, keys = self.q[:, :, self.rows], self.seen(self.keys)
        found = self.times(q, keys.mT).mul_(self.scale)
        is_cut = self.form.is_causal and self.n_keys - 1 > self.first
        if is_cut or self.table is not None or self.mask is not None:
            found += self._bias(self.table)
        return found

    def _bias(self, table: Tensor | None) -> Tensor:
        q, keys = self.q[:, :, self.rows], self.seen(self.keys)
        mask = None if self.mask is None else self.of_mask(self.mask)
        return score_bias(self.form, table, q, keys, mask, self.first)

    def of_mask(self, mask: Tensor) -> Tensor:
        """A mask, or its gradient, of these queries and keys."""
        if mask.shape[2] > 1:
            mask = mask[:, :, self.rows]
        start, stop = self.block
        return mask[..., start:stop] if mask.shape[3] > 1 else mask

    def to_table(self, gradient: Tensor) -> Tensor:
        """The gradient of the table of relative positions."""
        assert self.table is not None, "only attentions with a table ask"
        with torch.enable_grad():
            table = self.table.detach().requires_grad_()
            bias = self._bias(table)
        (found,) = torch.autograd.grad(bias, table, gradient.sum_to_size(bias.shape).to(bias.dtype))
        return found

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """Rows of each head times a matrix of its group; the product in 32 bits at least."""
        product = self._by_group(x).to(y.dtype) @ y
        wide = product.to(torch.promote_types(product.dtype, torch.float32))
        found: Tensor = wide.unflatten(2, (self.form.queries_per_group, -1)).flatten(1, 2)
        return found

    def summed(self, x: Tensor, y: Tensor) -> Tensor:
        """Transposed x times y, summed over the heads of a group."""
        return self._by_group(x).to(y.dtype).mT @ self._by_group(y)

    def _by_group(self, x: Tensor) -> Tensor:
        """(samples, heads, queries, n) as (samples, groups, heads of a group x queries, n)."""
        found: Tensor = x.unflatten(1, (-1, self.form.queries_per_group)).flatten(2, 3)
        return found


def _parts(
    form: AttentionForm,
    q: Tensor,
    keys: Tensor,
    table: Tensor | None,
    mask: Tensor | None,
    ring: KeyRing,
    place: int,
) -> Iterator[_Part]:
    """The queries of a device and the keys of a block, as many at once as memory should hold.

    Later keys are left out where nobody sees them; with a mask a query may see nothing else.
    """
    start, stop = ring.blocks[place]
    first, n_queries = ring.blocks[ring.at][0], q.shape[2]
    n_rows = max(1, _N_SCORES[q.device.type] // (q.shape[0] * q.shape[1] * (stop - start)))
    for low in range(0, n_queries, n_rows):
        high = min(n_queries, low + n_rows)
        is_cut = form.is_causal and mask is None
        n_keys = min(stop, first + high) - start if is_cut else stop - start
        if n_keys > 0:
            after = first + low - start
            rows = slice(low, high)
            yield _Part(form, q, keys, table, mask, (start, stop), rows, n_keys, after)

"""Models whose attentions are operators between linear layers, as transformers and timm write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE = (7,)
N_TOKENS, N_CLASSES = 11, 6
_WIDTH, _N_HEADS, _HEAD_DIM = 16, 4, 4
_LENGTH = SHAPE[0]


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, _HEAD_DIM).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], _WIDTH)


class Separate(nn.Module):
    """Three projections, with a number of groups of keys and values."""

    def __init__(self, n_groups: int = _N_HEADS) -> None:
        super().__init__()
        self.q_proj = nn.Linear(_WIDTH, _WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(_WIDTH, n_groups * _HEAD_DIM) for _ in range(2))
        self.o_proj = nn.Linear(_WIDTH, _WIDTH)
        self.n_each = _N_HEADS // n_groups

    def projected(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _heads(self.q_proj(x)), _heads(self.k_proj(memory)), _heads(self.v_proj(memory))

    def repeated(self, x: Tensor) -> Tensor:
        n, groups, length, size = x.shape
        wide = x[:, :, None, :, :].expand(n, groups, self.n_each, length, size)
        return wide.reshape(n, groups * self.n_each, length, size)


class Rotary(Separate):
    """Llama: tables of angles and a mask are made in forward."""

    def forward(self, x: Tensor, is_shown: Tensor) -> Tensor:
        q, k, v = self.projected(x, x)
        powers = torch.arange(0, _HEAD_DIM, 2, dtype=x.dtype) / _HEAD_DIM
        angles = torch.arange(_LENGTH)[:, None] * 10.0**-powers
        cos, sin = (f(torch.cat((angles, angles), -1))[None, None] for f in (torch.cos, torch.sin))
        q, k = (y * cos + self.rotated(y) * sin for y in (q, k))
        later = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)
        hidden = later[None, None] | ~is_shown[:, None, None, :]
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
        k, v = self.repeated(k), self.repeated(v)
        return self.o_proj(_merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))

    @staticmethod
    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., : _HEAD_DIM // 2], x[..., _HEAD_DIM // 2 :]
        return torch.cat((-b, a), dim=-1)


class Causal(nn.Module):
    """GPT-2: one product by a transposed weight, and no mask but a causal one; grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(_WIDTH, 2 * _WIDTH))
        self.bias = nn.Parameter(torch.empty(2 * _WIDTH))
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, is_shown: Tensor) -> Tensor:
        product = torch.addmm(self.bias, x.view(-1, _WIDTH), self.weight)
        parts = product.view(*x.shape[:2], -1).split([_WIDTH, _WIDTH // 2, _WIDTH // 2], dim=2)
        mix = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return self.out(_merged(mix(*map(_heads, parts))))


class Relative(Separate):
    """T5 and BERT: products, with learned relative positions and padding beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * _LENGTH - 1, _N_HEADS)
        self.dropout = nn.Dropout(0.0)

    def bias(self, x: Tensor, is_shown: Tensor) -> Tensor:
        places = torch.arange(_LENGTH)
        relative = self.table(places[None] - places[:, None] + _LENGTH - 1).permute(2, 0, 1)[None]
        hidden = (1.0 - is_shown[:, None, None, :].to(x.dtype)) * -1e4
        return relative + hidden

    def forward(self, x: Tensor, is_shown: Tensor) -> Tensor:
        q, k, v = self.projected(x, x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / _HEAD_DIM**0.5 + self.bias(x, is_shown)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        return self.o_proj(_merged(torch.matmul(weights, v)))


class Capped(Relative):
    """Gemma 2: scores are limited, so that keys of other devices cannot follow one by one."""

    def forward(self, x: Tensor, is_shown: Tensor) -> Tensor:
        q, k, v = self.projected(x, x)
        scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5) * 2.0
        weights = torch.softmax(scores + self.bias(x, is_shown), dim=-1)
        return self.o_proj(_merged(weights @ v))


class Crossed(Separate):
    """BART: the keys are of another sequence; the mask is boolean."""

    def forward(self, x: Tensor, is_shown: Tensor) -> Tensor:
        q, k, v = self.projected(x, torch.tanh(x.flip(1)))
        mask = is_shown[:, None, None, :].expand(-1, 1, _LENGTH, -1)
        return self.o_proj(_merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class Stacked(nn.Module):
    """timm: one product, whose queries, keys and values are stacked, and a constant of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("slopes", -torch.arange(_LENGTH).expand(_LENGTH, -1) / 2.0)

    def forward(self, x: Tensor, is_shown: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(x).reshape(n, length, 3, _N_HEADS, _HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        scores = (q * _HEAD_DIM**-0.5) @ k.transpose(-2, -1) + self.slopes
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(n, length, width))


class Reader(nn.Module):
    """Blocks that read tokens, of which the last one is padding."""

    def __init__(self, *attentions: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_TOKENS, _WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in attentions)
        self.attentions = nn.ModuleList(make() for make in attentions)
        self.wide, self.narrow = nn.Linear(_WIDTH, 24), nn.Linear(24, _WIDTH)
        self.final, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, N_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        is_shown = tokens < N_TOKENS - 1
        is_shown = is_shown | (torch.arange(_LENGTH) == 0)
        x = self.embedding(tokens)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x), is_shown)
            x = x + self.narrow(F.gelu(self.wide(x)))
        return self.head(self.final(x).mean(dim=1))  # without a norm, training diverges


_KINDS: dict[str, Callable[[], nn.Module]] = {
    "rotary": partial(Rotary, n_groups=2),
    "causal": Causal,
    "relative": Relative,
    "capped": Capped,
    "crossed": Crossed,
    "stacked": Stacked,
}
ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Reader, make, make) for name, make in _KINDS.items()},
    "attentions": partial(Reader, *_KINDS.values()),
}

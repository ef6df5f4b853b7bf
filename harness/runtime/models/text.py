"""Models of text: BERT, GPT-2, Llama and T5, from transformer blocks, and a translator of LSTMs.

Sources: Devlin et al., 2019; Radford et al., 2019; Touvron et al., 2023; Raffel et al., 2020; of
the translator Luong et al., 2015, and Wu et al., "GNMT", 2016 (stacks with residuals). Their
dropout of attention probabilities is left out, because fused attention kernels leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.errors import ModelError
from harness.runtime.models.attention import GroupedAttention
from harness.runtime.models.mixture import Mixture
from harness.runtime.models.task import PADDING, ModelOptions, TextOptions

_ROTARY_BASE = 10_000.0
_N_BUCKETS = 32  # of T5's relative positions
_STD = 0.02

Norm = Callable[[int], nn.Module]


def check_text(name: str, options: TextOptions) -> None:
    """Refuse sizes that do not divide each other."""
    width, heads, groups = options.width, options.n_heads, options.n_groups
    if width % heads or (width // heads) % 2:
        raise ModelError(
            f"{name} has width {width} and {heads} heads: a head needs an even number of "
            f"features; make --width a multiple of {2 * heads}, or change --n-heads"
        )
    if heads % groups:
        raise ModelError(
            f"{name} has {heads} heads in {groups} groups: make --n-heads a multiple of --n-groups"
        )
    n_experts, n_chosen = options.n_experts, options.n_experts_per_token
    if not n_experts and (n_chosen or options.capacity_factor):
        raise ModelError(
            f"{name} has no experts, so it has no --n-experts-per-token and no --capacity-factor: "
            "give --n-experts too"
        )
    if n_experts < n_chosen:
        raise ModelError(
            f"a token of {name} has {n_chosen} of {n_experts} experts: lower "
            "--n-experts-per-token, or raise --n-experts"
        )


class Mlp(nn.Module):
    """Two linear layers around an activation."""

    def __init__(
        self, sizes: TextOptions, activation: Callable[[], nn.Module], *, has_bias: bool
    ) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.mlp_width
        self.up = nn.Linear(width, inner, bias=has_bias)
        self.activation = activation()
        self.down = nn.Linear(inner, width, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, sizes: TextOptions) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.mlp_width
        self.gate = nn.Linear(width, inner, bias=False)
        self.activation = nn.SiLU()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention, attention over a memory if there is one, and an MLP, each with a residual.

    Args:
        is_post_norm: normalise after each sum, as BERT does, instead of before each part.
        cross: attention over the memory.
    """

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        mlp: nn.Module,
        norm: Norm,
        dropout: float,
        *,
        is_post_norm: bool = False,
        cross: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.is_post_norm = is_post_norm
        self.attention, self.attention_norm = attention, norm(width)
        self.attention_dropout = nn.Dropout(dropout)
        if cross is not None:
            self.cross, self.cross_norm = cross, norm(width)
            self.cross_dropout = nn.Dropout(dropout)
        self.mlp, self.mlp_norm = mlp, norm(width)
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        if self.is_post_norm:
            x = self.attention_norm(x + self.attention_dropout(self.attention(x, x, mask)))
            found: Tensor = self.mlp_norm(x + self.mlp_dropout(self.mlp(x)))
            return found
        y = self.attention_norm(x)
        x = x + self.attention_dropout(self.attention(y, y, mask))
        if memory is not None:
            y = self.cross_norm(x)
            x = x + self.cross_dropout(self.cross(y, memory, memory_mask))
        y = self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        summed: Tensor = x + y
        return summed


def initialise(model: nn.Module) -> None:
    """Draw weights as GPT-2 and BERT do."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _blocks(
    sizes: TextOptions, mlp: Callable[[], nn.Module], norm: Norm, dropout: float, *,
    is_post_norm: bool = False, has_cross: bool = False, has_bias: bool = True, **attention: Any,
) -> nn.ModuleList:  # fmt: skip
    """Blocks whose attention, a GroupedAttention with some options, is over their own input; with
    `has_cross`, each has another, without options, over a memory."""
    attend = partial(
        GroupedAttention, sizes.width, sizes.n_heads, n_groups=sizes.n_groups, has_bias=has_bias
    )
    return nn.ModuleList(
        Block(
            sizes.width, attend(**attention), mlp(), norm, dropout, is_post_norm=is_post_norm,
            cross=attend() if has_cross else None,
        )
        for _ in range(sizes.n_layers)
    )  # fmt: skip


class Bert(nn.Module):
    """An encoder. Called with tokens and segments (n, length); padding is masked.

    Returns logits by its head: classes (n, classes), span (n, length, 2) or tokens
    (n, length, vocabulary).
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        sizes = options.text
        width = sizes.width
        norm = partial(nn.LayerNorm, eps=1e-12)
        self.head = sizes.head
        self.tokens = nn.Embedding(sizes.vocabulary_size, width)
        self.segments = nn.Embedding(2, width)
        self.positions = nn.Parameter(self.tokens.weight.new_empty(sizes.sequence_length, width))
        self.norm, self.dropout = norm(width), nn.Dropout(0.1)
        mlp = partial(Mlp, sizes, nn.GELU, has_bias=True)
        self.blocks = _blocks(sizes, mlp, norm, 0.1, is_post_norm=True)
        if self.head == "tokens":
            self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), norm(width))
        elif self.head == "classes":
            self.transform = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))
            self.output = nn.Linear(width, options.n_classes)
        else:
            self.output = nn.Linear(width, 2)
        initialise(self)
        nn.init.normal_(self.positions, std=_STD)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        mask = tokens.ne(PADDING)
        x = self.tokens(tokens) + self.segments(segments) + self.positions
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, mask)
        if self.head == "tokens":
            return F.linear(self.transform(x), self.tokens.weight)
        x = self.transform(x[:, 0]) if self.head == "classes" else x
        logits: Tensor = self.output(x)
        return logits


class Gpt2(nn.Module):
    """A decoder with learned positions and tied embeddings: tokens (n, length) to logits."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        sizes = options.text
        width = sizes.width
        self.tokens = nn.Embedding(sizes.vocabulary_size, width)
        self.positions = nn.Parameter(self.tokens.weight.new_empty(sizes.sequence_length, width))
        self.dropout = nn.Dropout(0.1)
        mlp = partial(Mlp, sizes, partial(nn.GELU, approximate="tanh"), has_bias=True)
        self.blocks = _blocks(sizes, mlp, nn.LayerNorm, 0.1, is_causal=True)
        self.norm = nn.LayerNorm(width)
        initialise(self)
        nn.init.normal_(self.positions, std=_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Llama(nn.Module):
    """A decoder with grouped queries, rotary positions, RMSNorm and SwiGLU, or mixtures of it."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        sizes = options.text
        width = sizes.width
        norm = partial(nn.RMSNorm, eps=1e-5)
        mlp: Callable[[], nn.Module] = partial(GatedMlp, sizes)
        if sizes.n_experts:
            mlp = partial(
                Mixture, width, sizes.mlp_width, sizes.sequence_length, n_experts=sizes.n_experts,
                n_chosen=sizes.n_experts_per_token, capacity_factor=sizes.capacity_factor,
            )  # fmt: skip
        self.tokens = nn.Embedding(sizes.vocabulary_size, width)
        self.blocks = _blocks(
            sizes, mlp, norm, 0.0,
            has_bias=False, is_causal=True, rotary_base=_ROTARY_BASE,
        )  # fmt: skip
        self.norm = norm(width)
        self.output = nn.Linear(width, sizes.vocabulary_size, bias=False)
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class T5(nn.Module):
    """An encoder and a decoder with learned relative positions, as T5.

    Each attention has positions of its own (as UMT5), and the output layer is not tied (as T5 1.1).
    Called with source and target tokens (n, length), the target shifted right; padding is masked.
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        sizes = options.text
        self.tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.dropout = nn.Dropout(0.1)
        norm = partial(nn.RMSNorm, eps=1e-6)
        blocks = partial(
            _blocks, sizes, partial(Mlp, sizes, nn.ReLU, has_bias=False), norm, 0.1,
            has_bias=False, n_buckets=_N_BUCKETS,
        )  # fmt: skip
        self.encoder, self.decoder = blocks(), blocks(is_causal=True, has_cross=True)
        self.encoder_norm, self.decoder_norm = norm(sizes.width), norm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary_size, bias=False)
        initialise(self)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = source.ne(PADDING)
        memory = self.dropout(self.tokens(source))
        for block in self.encoder:
            memory = block(memory, mask)
        memory = self.encoder_norm(memory)
        x = self.dropout(self.tokens(target))
        for block in self.decoder:
            x = block(x, None, memory, mask)
        logits: Tensor = self.output(self.decoder_norm(x))
        return logits


class LstmStack(nn.Module):
    """LSTM layers, each a module of its own, so that a pipeline can cut between them; with
    residuals from the second on."""

    def __init__(self, width: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(n_layers)
        )
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, length, width) to the last layer's outputs, of the same shape."""
        for number, (layer, dropout) in enumerate(zip(self.layers, self.dropouts, strict=True)):
            y = dropout(layer(x)[0])
            x = x + y if number else y
        return x


class Nmt(nn.Module):
    """Called with source and target tokens (n, length), the target shifted right.

    Source padding is masked in the attention. The decoder starts from a state of zeros.
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        sizes = options.text
        self.source_tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.target_tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.encoder = LstmStack(sizes.width, sizes.n_layers, 0.2)
        self.decoder = LstmStack(sizes.width, sizes.n_layers, 0.2)
        self.attention = GroupedAttention(
            sizes.width, sizes.n_heads, n_groups=sizes.n_groups, has_bias=False
        )
        self.combine = nn.Linear(2 * sizes.width, sizes.width, bias=False)
        self.activation = nn.Tanh()
        self.output = nn.Linear(sizes.width, sizes.vocabulary_size, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source_tokens(source))
        x = self.decoder(self.target_tokens(target))
        context = self.attention(x, memory, source.ne(PADDING))
        combined = self.activation(self.combine(torch.cat((context, x), dim=2)))
        logits: Tensor = self.output(combined)
        return logits

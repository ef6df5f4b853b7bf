"""The shards of a module that is cut along its weights: a fresh module of the shard's sizes.

Only its times matter: weights are new, and results are not those of the whole module.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.domain.sharding import CONTRACTION, HEADS


class HeadsShard(nn.Module):
    """Some heads of an nn.MultiheadAttention: their projections, and a partial sum of the output.

    Called as the whole module is; the weights of attention itself are not returned.
    """

    def __init__(self, whole: nn.MultiheadAttention, n_heads: int) -> None:
        super().__init__()
        width = whole.head_dim * n_heads
        bias = whole.in_proj_bias is not None
        self.n_heads = n_heads
        self.dropout = whole.dropout
        self.inward = nn.Linear(whole.embed_dim, 3 * width, bias=bias)
        self.outward = nn.Linear(width, whole.embed_dim, bias=whole.out_proj.bias is not None)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, **options: object
    ) -> tuple[Tensor, None]:
        """(n, sequence, features) each; returns the same."""
        q, k, v = self._project(query, key, value)
        mixed = F.scaled_dot_product_attention(
            self._split(q), self._split(k), self._split(v), dropout_p=self.dropout
        )
        summed: Tensor = self.outward(mixed.transpose(1, 2).flatten(2))
        return summed, None

    def _project(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if inputs[0] is inputs[1] is inputs[2]:  # one product, as the whole module does
            whole: Tensor = self.inward(inputs[0])
            return tuple(whole.chunk(3, dim=-1))
        weights = self.inward.weight.chunk(3)
        biases = self.inward.bias.chunk(3) if self.inward.bias is not None else (None,) * 3
        return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return heads


def _conv2d(whole: nn.Conv2d, n_features: int) -> nn.Module | None:
    if whole.groups != 1:
        return None  # its parts also read other channels
    return nn.Conv2d(
        whole.in_channels,
        n_features,
        whole.kernel_size,  # type: ignore[arg-type]
        whole.stride,  # type: ignore[arg-type]
        whole.padding,  # type: ignore[arg-type]
        whole.dilation,  # type: ignore[arg-type]
        bias=whole.bias is not None,
        padding_mode=whole.padding_mode,
    )


def _attention(whole: nn.MultiheadAttention, n_heads: int) -> nn.Module | None:
    if not whole.batch_first or not whole._qkv_same_embed_dim:
        return None
    return HeadsShard(whole, n_heads)


def _shard(module: nn.Module, dim: str, size: int) -> nn.Module | None:
    if dim == HEADS:
        return _attention(module, size) if isinstance(module, nn.MultiheadAttention) else None
    if isinstance(module, nn.Linear):
        if dim == CONTRACTION:  # the bias is added once, to one of the partial sums
            return nn.Linear(size, module.out_features, bias=False)
        return nn.Linear(module.in_features, size, bias=module.bias is not None)
    if dim == CONTRACTION:
        return None
    if isinstance(module, nn.Conv2d):
        return _conv2d(module, size)
    if isinstance(module, nn.Embedding):
        return nn.Embedding(module.num_embeddings, size, sparse=module.sparse)
    if isinstance(module, nn.EmbeddingBag):
        return nn.EmbeddingBag(module.num_embeddings, size, mode=module.mode, sparse=module.sparse)
    return None


def shard_module(module: nn.Module, dim: str, size: int) -> nn.Module | None:
    """A fresh part of a module with `size` of its output features, heads or, for a contraction,
    input features; None if it has none.

    It lies where the module does, has its dtype, and is in training mode.
    """
    like = next(module.parameters(), None)
    if like is None:
        return None
    with torch.device(like.device):
        part = _shard(module, dim, size)
    return None if part is None else part.to(like.dtype).train(module.training)

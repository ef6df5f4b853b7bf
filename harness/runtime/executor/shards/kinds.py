"""The shard of any operator that can be cut along other dims than samples."""

from __future__ import annotations

from harness.runtime.executor.shards.attention import make_any_attention
from harness.runtime.executor.shards.base import Make, Shard, ShardSpec, has_plain_weights
from harness.runtime.executor.shards.batch_norm import make_batch_norm_shard
from harness.runtime.executor.shards.conv import make_conv2d, make_pool
from harness.runtime.executor.shards.dense import (
    make_einsum,
    make_embedding,
    make_layer_norm,
    make_linear,
)
from harness.runtime.executor.shards.pointwise import make_pointwise
from harness.runtime.executor.shards.regions import LackingError

_MAKERS: dict[str, Make] = {
    "linear": make_linear,
    "conv2d": make_conv2d,
    "pool": make_pool,
    "batch_norm": make_batch_norm_shard,
    "layer_norm": make_layer_norm,
    "elementwise": make_pointwise,
    "add": make_pointwise,
    "embedding": make_embedding,
    "einsum": make_einsum,
    "attention": make_any_attention,
}


def make_shard(part: ShardSpec) -> Shard | None:
    """Make the module that computes a block of an operator, with copies of its weight slices.

    Returns:
        None if the operator or the cut has no shard; then compute the whole and crop it.
    """
    make = _MAKERS.get(part.operator.kind)
    if make is None or (part.module is not None and not has_plain_weights(part.module)):
        return None
    try:
        shard = make(part)
    except LackingError:
        return None
    return None if shard is None else part.in_mode(shard)

"""The shard of any operator that can be cut along other dims than samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from harness.domain.graph import Operator
from harness.domain.partition import Block
from harness.runtime.executor.shards import pointwise
from harness.runtime.executor.shards.attention import make_attention, make_grouped_attention
from harness.runtime.executor.shards.attention_region import make_attention_region
from harness.runtime.executor.shards.base import Make, Shard, ShardSpec, Wanted, has_plain_weights
from harness.runtime.executor.shards.batch_norm import make_batch_norm, make_batch_norm_shard
from harness.runtime.executor.shards.conv import make_conv2d, make_pool
from harness.runtime.executor.shards.dense import make_embedding, make_layer_norm, make_linear
from harness.runtime.executor.shards.pointwise import make_pointwise

__all__ = ["Shard", "Wanted", "make_batch_norm", "make_dropout", "make_shard"]

_MAKERS: dict[str, Make] = {
    "linear": make_linear,
    "conv2d": make_conv2d,
    "pool": make_pool,
    "batch_norm": make_batch_norm_shard,
    "layer_norm": make_layer_norm,
    "elementwise": make_pointwise,
    "add": make_pointwise,
    "embedding": make_embedding,
    "attention": lambda part: (
        make_attention_region(part) or make_grouped_attention(part) or make_attention(part)
    ),
}


def make_shard(
    operator: Operator,
    node: fx.Node,
    root: nn.Module,
    shape: dict[str, int],
    block: Block,
    wanted: Sequence[Wanted],
) -> Shard | None:
    """Make the module that computes a block of an operator, with copies of its weight slices.

    Args:
        node: the operator's node in `root`.
        root: the traced model.
        shape: sizes by `domain.sharding.full_shape` at the microbatch size.
        block: intervals in the order of `shape`.
        wanted: one per input of the operator.

    Returns:
        None if the operator or the cut has no shard; then compute the whole and crop it.
    """
    make = _MAKERS.get(operator.kind)
    part = ShardSpec(
        operator=operator, node=node, root=root, shape=shape, block=block, wanted=wanted
    )
    module = part.module
    if make is None or (module is not None and not has_plain_weights(module)):
        return None
    shard = make(part)
    if shard is not None and module is not None:
        shard.train(module.training)
    return shard


def make_dropout(
    operator: Operator,
    node: fx.Node,
    root: nn.Module,
    shape: dict[str, int],
    block: Block,
    wanted: Sequence[Wanted],
    index: int,
    state: pointwise.RandomState,
) -> Shard | None:
    """Make the shard of a pointwise, whose mask is the block of the whole tensor's mask.

    Args:
        operator, node, root, shape, block, wanted: as for `make_shard`.
        index: number of the operator, equal on every rank.
        state: random state that all dropouts of this rank share.

    Returns:
        None if the operator is no pointwise.
    """
    part = ShardSpec(
        operator=operator, node=node, root=root, shape=shape, block=block, wanted=wanted
    )
    shard = pointwise.make_dropout(part, index, state)
    if shard is not None and part.module is not None:
        shard.train(part.module.training)
    return shard

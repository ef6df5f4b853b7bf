"""One part of an operator that is cut along its weights, called by itself.

It is the shard that the executor would train, on inputs as a device is handed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from harness.domain.graph import Operator
from harness.domain.partition import Block
from harness.domain.sharding import full_shape, input_block, output_sizes
from harness.runtime.capture.capture import Captured
from harness.runtime.executor.shards.kinds import Wanted, make_shard
from harness.runtime.profiling.stretch import OperatorCall, as_leaves, tensors_in


@dataclass(frozen=True)
class OperatorShard:
    """A part of an operator on weights of its own.

    Attributes:
        module: called with what it wants of each input.
        wants: of each input of the operator.
    """

    module: nn.Module
    wants: Sequence[Wanted]

    def call(self, call: OperatorCall) -> OperatorCall:
        """How the part is called where the operator is called so."""
        inputs = tensors_in((call.args, call.kwargs))
        parameters = tuple(self.module.parameters())
        return OperatorCall(self.module, _handed(inputs, self.wants), {}, parameters)


def operator_shard(
    captured: Captured, name: str, dim: str, size: int, call: OperatorCall
) -> OperatorShard | None:
    """The last `size` elements along `dim` of an operator; None if it has no such shard.

    The last, because a part along a dim that is summed over mostly adds no bias.

    Args:
        captured: its module lies where the call's tensors do.
        call: of the whole operator, on the batch that the graph was captured for.
    """
    if not isinstance(call.function, nn.Module):
        return None
    graph = captured.graph
    operators = {operator.name: operator for operator in graph.operators}
    operator = operators[name]
    shape = full_shape(operator, batch=graph.batch or 1, graph_batch=graph.batch)
    if size > shape.get(dim, 0):
        return None
    block = tuple((n - size if d == dim else 0, n) for d, n in shape.items())
    wants = [
        _wanted(operator, shape, block, operators[producer], argument)
        for argument, producer in enumerate(operator.inputs)
    ]
    inputs = tensors_in((call.args, call.kwargs))
    if [tuple(x.shape) for x in inputs] != [tuple(each.shape.values()) for each in wants]:
        return None
    shard = make_shard(operator, captured.nodes[name], captured.module, shape, block, wants)
    return None if shard is None else OperatorShard(shard, wants)


def _wanted(
    operator: Operator, shape: dict[str, int], block: Block, producer: Operator, argument: int
) -> Wanted:
    theirs = output_sizes(producer, producer.shape)
    return Wanted(theirs, input_block(operator, shape, block, theirs, argument=argument))


def _handed(inputs: Sequence[Tensor], wanted: Sequence[Wanted]) -> tuple[Tensor, ...]:
    """Leaves that lie together in memory, as what is received does; equal ones stay one."""
    known: dict[tuple[int, Block], Tensor] = {}
    for x, each in zip(inputs, wanted, strict=True):
        key = id(x), each.block
        if key not in known:
            block = x.detach()[tuple(slice(*interval) for interval in each.block)]
            known[key] = as_leaves(block.contiguous(), has_gradient=x.requires_grad)
    return tuple(known[id(x), each.block] for x, each in zip(inputs, wanted, strict=True))

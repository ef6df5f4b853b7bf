"""One operator by itself: a shard of it, and a run whose results are checked.

It is the executor's shard, on inputs with the layout that a device receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.domain.partition import Block
from harness.domain.sharding import full_shape, input_block, output_sizes
from harness.errors import VerificationError
from harness.runtime.capture.capture import Captured
from harness.runtime.capture.saved import tensors_within
from harness.runtime.executor.shards.base import ShardSpec, Wanted
from harness.runtime.executor.shards.kinds import make_shard
from harness.runtime.profiling.subgraph import OperatorCall, as_leaves, written


@dataclass(frozen=True)
class OperatorShard:
    """A shard of an operator with its own weights.

    Attributes:
        module: called with the wanted region of each input.
        wants: wanted region of each input of the operator.
    """

    module: nn.Module
    wants: Sequence[Wanted]

    def call(self, call: OperatorCall) -> OperatorCall:
        """Convert a call of the operator to a call of the shard."""
        parameters = tuple(self.module.parameters())
        regions = _regions(_inputs(call, self.wants), self.wants)
        return OperatorCall(self.module, regions, {}, parameters)


def operator_shard(
    captured: Captured, name: str, dim: str, size: int, call: OperatorCall
) -> OperatorShard | None:
    """Make the shard of the last `size` elements along `dim`; None if there is no such shard.

    The last shard is typical: if `dim` is summed over, only the first one adds the bias.

    Args:
        captured: the model, on the device of the call's tensors.
        call: the whole operator's call, with the batch that the graph was captured for.
    """
    graph = captured.graph
    operators = {operator.name: operator for operator in graph.operators}
    operator = operators[name]
    shape = full_shape(operator, batch=graph.batch or 1, graph_batch=graph.batch)
    if size > shape.get(dim, 0):
        return None
    block = tuple((n - size if d == dim else 0, n) for d, n in shape.items())
    wants = []
    for argument, producer in enumerate(operator.inputs):
        sizes = output_sizes(operators[producer], operators[producer].shape)
        wants.append(Wanted(sizes, input_block(operator, shape, block, sizes, argument=argument)))
    inputs = _inputs(call, wants)
    if [tuple(x.shape) for x in inputs] != [tuple(each.shape.values()) for each in wants]:
        return None
    shard = make_shard(
        ShardSpec(
            operator=operator,
            node=captured.nodes[name],
            root=captured.module,
            shape=shape,
            block=block,
            wanted=wants,
        )
    )
    return None if shard is None else OperatorShard(shard, wants)


def _inputs(call: OperatorCall, wants: Sequence[Wanted]) -> list[Tensor]:
    """The tensors that operators made; a function's weights follow them."""
    return tensors_within((call.args, call.kwargs))[: len(wants)]


def _regions(inputs: Sequence[Tensor], wanted: Sequence[Wanted]) -> tuple[Tensor, ...]:
    """Cut the wanted regions: contiguous leaves, like received tensors; equal regions share one."""
    known: dict[tuple[int, Block], Tensor] = {}
    for x, each in zip(inputs, wanted, strict=True):
        key = id(x), each.block
        if key not in known:
            block = x.detach()[tuple(slice(*interval) for interval in each.block)]
            known[key] = as_leaves(block.contiguous(), has_gradient=x.requires_grad)
    return tuple(known[id(x), each.block] for x, each in zip(inputs, wanted, strict=True))


def verify(
    call: OperatorCall,
    subject: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    is_sound: Callable[[], bool] = lambda: False,
) -> int:
    """Run an operator once, and check that its outputs and gradients are finite.

    Args:
        subject: names the operator in the error.
        is_sound: whether the loss of the whole model is finite; then intermediate values may be
            infinite, such as those of a causal mask.

    Returns:
        Bytes of the tensors kept for its backward pass, with inputs, without parameters.

    Raises:
        VerificationError: an output or a gradient is not finite, nor is the loss.
    """
    parameters = {parameter.data_ptr() for parameter in call.parameters}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            n_bytes = tensor.numel() * tensor.element_size()
            saved[tensor.data_ptr()] = max(n_bytes, saved.get(tensor.data_ptr(), 0))
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, autocast():
        output = written(call)()
    gradients = _gradients(call, output)
    for kind, tensors in (("output", tensors_within(output)), ("gradient", gradients)):
        for tensor in tensors:
            values = tensor.coalesce().values() if tensor.is_sparse else tensor
            if not bool(torch.isfinite(values).all()) and not is_sound():
                raise VerificationError(
                    f"{subject} gives {kind}s that are not finite, and nor is the model's loss: "
                    "check its initial weights, or another --dtype"
                )
    return sum(saved.values())


def _gradients(call: OperatorCall, output: Any) -> list[Tensor]:
    """Gradients of the tensors that a call wants, from output gradients of 1."""
    outputs = [tensor for tensor in tensors_within(output) if tensor.requires_grad]
    if not outputs or not call.wanted:
        return []
    ones = [torch.ones_like(tensor) for tensor in outputs]
    found = torch.autograd.grad(outputs, call.wanted, ones, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]

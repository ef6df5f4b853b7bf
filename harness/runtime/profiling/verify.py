"""Run one operator: check that its results are finite, and count bytes kept for its backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from harness.errors import VerificationError
from harness.runtime.profiling.subgraph import OperatorCall, tensors_in, written


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
    for kind, tensors in (("output", tensors_in(output)), ("gradient", gradients)):
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
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs or not call.wanted:
        return []
    ones = [torch.ones_like(tensor) for tensor in outputs]
    found = torch.autograd.grad(outputs, call.wanted, ones, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]

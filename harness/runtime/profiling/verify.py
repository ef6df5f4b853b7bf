"""Run one operator once by itself: is what it gives finite, and what does it keep for backward?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from harness.errors import VerificationError
from harness.runtime.profiling.stretch import OperatorCall, tensors_in, written


def verify(
    call: OperatorCall,
    what: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    is_sound: Callable[[], bool] = lambda: False,
) -> int:
    """Run an operator once by itself, and check that all it gives is finite.

    Args:
        is_sound: whether the loss of the whole model is finite. Values on the way may then be
            infinite, such as those of a causal mask.

    Returns:
        Bytes of the tensors kept for its backward pass, with inputs, without parameters.

    Raises:
        VerificationError: an output or a gradient is not finite, nor is the loss.
    """
    own = {parameter.data_ptr() for parameter in call.parameters}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
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
                    f"{what} gives {kind}s that are not finite, and nor is the model's loss: check "
                    "its initial weights, or another --dtype"
                )
    return sum(saved.values())


def _gradients(call: OperatorCall, output: Any) -> list[Tensor]:
    """Of what a call wants, from gradients of one."""
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs or not call.wanted:
        return []
    ones = [torch.ones_like(tensor) for tensor in outputs]
    found = torch.autograd.grad(outputs, call.wanted, ones, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]

"""Follow `torch.cat(list(x))` during an export, by which models join the samples of x again.

The list has one row in the place of all samples, because their number is open.
"""

from __future__ import annotations

from typing import Any

from torch import SymInt, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from harness.runtime.capture.operators import CONCATENATIONS, function_name
from harness.runtime.tracing.constructs import ConstructError


class JoinedSamples(TorchFunctionMode):
    """Lets a model join samples, and refuses what else it does with one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}  # the row, and x

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, function_name(func)
        if name == "unbind" and not any((*args[1:], *kwargs.values())) and _is_open(args[0]):
            row = args[0][0]
            self._samples[id(row)] = row, args[0]
            return (row,)
        if name == "__len__" and any(args[0] is whole for _, whole in self._samples.values()):
            raise TypeError("the number of samples is open")  # `list` asks, and does without
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        found = [self._samples[id(x)][1] for x in tensors if id(x) in self._samples]
        if not found or name == "__get__":
            return func(*args, **kwargs)
        if len(tensors) == 1 and not any((*args[1:], *kwargs.values())):
            if name in CONCATENATIONS:
                return found[0].flatten(0, 1)
            if name == "stack":
                return found[0]
        raise ConstructError(
            "forward loops over the samples of a batch: compute on all of them at once"
        )


def _is_open(x: Tensor) -> bool:
    return x.dim() > 0 and isinstance(x.shape[0], SymInt)

"""Functions that a traced graph calls where torch.fx has no node of its own.

Each is one operator of a graph, which runs the user's own code forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Takes the gradient of a tensor; returns one that replaces it, or None.
GradientHook = Callable[[Tensor], Tensor | None]


def detach(value: Any) -> Any:
    """A tensor without its graph; anything else, such as a size, as it is."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(detach(part) for part in value)
    return value


class OpaqueFunction:
    """A function whose code torch.fx does not look into.

    torch.fx writes a target by its name, and copies of a graph share the target.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __deepcopy__(self, memo: object) -> OpaqueFunction:
        return self

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError


class CustomFunction(OpaqueFunction):
    """A call of a `torch.autograd.Function`.

    Args:
        fixed: arguments that a graph cannot hold, by position.
    """

    def __init__(self, function: type[torch.autograd.Function], fixed: dict[int, Any]) -> None:
        super().__init__(function.__name__)
        self.function, self._fixed = function, fixed

    def __call__(self, *args: Any) -> Any:
        given = iter(args)
        n_args = len(args) + len(self._fixed)
        every = [self._fixed[k] if k in self._fixed else next(given) for k in range(n_args)]
        if self.writes_inputs:
            every = [x.clone() if isinstance(x, Tensor) else x for x in every]
        return self.function.apply(*every)

    @property
    def writes_inputs(self) -> bool:
        """Whether it may change its inputs in place."""
        codes = (getattr(self.function, name) for name in ("forward", "setup_context"))
        names = [n for f in codes for n in getattr(getattr(f, "__code__", None), "co_names", ())]
        return "mark_dirty" in names


class ReadBuffer(OpaqueFunction):
    """What a buffer holds when a step begins."""

    def __init__(self, name: str) -> None:
        super().__init__(f"read_{name.replace('.', '_')}")
        self.name = name

    def __call__(self, buffer: Tensor) -> Tensor:
        return buffer.clone()


class WriteBuffer(OpaqueFunction):
    """What a buffer holds from now on."""

    def __init__(self, name: str) -> None:
        super().__init__(f"write_{name.replace('.', '_')}")
        self.name = name

    def __call__(self, buffer: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            return buffer.copy_(value).clone()


def copied(target: Tensor, source: Any, *_: Any) -> Tensor:
    """What `target.copy_(source)` gives, in new memory."""
    return target.clone().copy_(source)


def with_items(target: Tensor, index: Any, value: Any) -> Tensor:
    """What `target[index] = value` leaves, in new memory."""
    changed = target.clone()
    changed[index] = value
    return changed


class GradientHooks(OpaqueFunction):
    """The identity, which hands the gradient of its output to hooks, in order."""

    def __init__(self, hooks: Sequence[GradientHook]) -> None:
        super().__init__("register_hook")
        self.hooks = list(hooks)

    def __call__(self, x: Tensor) -> Tensor:
        output = x.clone()
        if output.requires_grad:
            for hook in self.hooks:
                output.register_hook(hook)
        return output

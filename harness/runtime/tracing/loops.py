"""Keep modules whose forward loops over a sequence (the scan of a state space model) as one
operator of an export each, because the loop would be thousands of operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.capture.meta_run import tensors_in_order
from harness.runtime.tracing.functions import OpaqueFunction

# Functions of torch that one forward may call, without those of its submodules.
LONGEST = 500
# A module with a larger share of the model's parameters is not kept whole.
LARGEST_SHARE = 0.5


class LoopError(Exception):
    """The forward of a kind of module calls more than LONGEST functions."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(f"forward of {kind.__name__} calls more than {LONGEST} functions")
        self.kind = kind


class WholeModule(OpaqueFunction):
    """A call of a module, given its tensors and then its weights.

    Args:
        leaves: the values of all arguments, with None at the tensors.
        positions: of the tensors among the leaves.
    """

    def __init__(
        self, module: nn.Module, leaves: list[Any], structure: Any, positions: list[int]
    ) -> None:
        super().__init__(type(module).__name__)
        self._module, self._names = meta_copy(module), list(weights_of(module))
        self._leaves, self._structure, self._positions = leaves, structure, positions

    def __call__(self, *args: Tensor) -> Any:
        found = tensors_in_order(self.returned(*args))
        return found[0] if len(found) == 1 else tuple(found)

    def returned(self, *args: Tensor) -> Any:
        """What the module returns, tensors or not."""
        given, weights = args[: len(self._positions)], args[len(self._positions) :]
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, given, strict=True):
            leaves[position] = tensor
        inputs, keywords = pytree.tree_unflatten(leaves, self._structure)
        named = dict(zip(self._names, weights, strict=True))
        # The model makes anew what the module keeps, or the comparison with it fails.
        before = [(vars(part), dict(vars(part))) for part in self._module.modules()]
        try:
            return functional_call(self._module, named, inputs, keywords)
        finally:
            for attributes, kept in before:
                attributes.clear()
                attributes.update(kept)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def with_large_shares(model: nn.Module) -> list[nn.Module]:
    """Modules with too many of a model's parameters to be kept whole."""
    parts = {part: sum(p.numel() for p in part.parameters()) for part in model.modules()}
    return [part for part, size in parts.items() if size >= LARGEST_SHARE * parts[model]]


class _Counter(TorchFunctionMode):
    """Counts the functions that each running forward calls itself.

    Args:
        allowed: kinds of modules that may call any number.
    """

    def __init__(self, kind_of: Callable[[nn.Module], type[nn.Module]], allowed: Any) -> None:
        super().__init__()
        self._kind_of, self._allowed = kind_of, allowed
        self._running: list[tuple[type[nn.Module], list[None]]] = []

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._running.append((self._kind_of(module), []))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and getattr(func, "__name__", "") != "__get__":
            kind, calls = self._running[-1]
            calls.append(None)
            if len(calls) > LONGEST and kind not in self._allowed:
                raise LoopError(kind)
        return func(*args, **(kwargs or {}))


@contextmanager
def loops_found(model: nn.Module, allowed: Collection[type[nn.Module]]) -> Iterator[None]:
    """Raise LoopError in the block if a module of `model` loops, but for kinds that may."""
    # An export gives modules another type, and the same `__dict__`.
    kinds = {id(vars(part)): type(part) for part in model.modules()}
    large = {type(part) for part in with_large_shares(model)}
    counter = _Counter(lambda module: kinds.get(id(vars(module)), type(module)), {*allowed, *large})
    hooks = (
        module_hooks.register_module_forward_pre_hook(counter.enter),
        module_hooks.register_module_forward_hook(counter.leave, always_call=True),
    )
    try:
        with counter:
            yield
    finally:
        for hook in hooks:
            hook.remove()

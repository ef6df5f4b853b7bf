"""Keep calls of autograd functions and of some modules in an export, which would trace through
their forwards.

Each call becomes a custom operator during the export, and then one operator of the graph.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from harness.runtime.tracing.constructs import ConstructError
from harness.runtime.tracing.functions import CustomFunction, OpaqueFunction
from harness.runtime.tracing.known_values import size_of
from harness.runtime.tracing.loops import WholeModule, weights_of
from harness.runtime.tracing.patches import original_apply

_NUMBERS = count()  # of exports, because an earlier one's operators may still be there
_SIZES = (2, 3)  # numbers of samples


class ExportedFunctions:
    """The autograd functions and whole modules that one export meets; the library defines their
    operators."""

    def __init__(self) -> None:
        self._namespace = f"harness_export_{next(_NUMBERS)}"
        self._library = torch.library.Library(self._namespace, "FRAGMENT")
        self._made: dict[Any, OpaqueFunction] = {}

    def apply(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Call a function as a custom operator."""
        given = [x for x in args if isinstance(x, Tensor)]
        fixed = {k: x for k, x in enumerate(args) if not isinstance(x, Tensor)}
        if any(
            isinstance(leaf, Tensor | nn.Module | torch.SymInt | torch.SymFloat)
            for leaf in tree_leaves(list(fixed.values()))
        ):
            raise ConstructError(
                f"the autograd function {function.__name__} takes a module, a nested tensor or a "
                "number that depends on the batch, which torch.export drops: give it tensors"
            )
        with disable_proxy_modes_tracing(), torch.no_grad():
            found = original_apply(function, *args)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        if not all(isinstance(x, Tensor) for x in outputs):
            raise ConstructError(
                f"the autograd function {function.__name__} returns other values than tensors, "
                "which torch.export drops"
            )
        return self._define(CustomFunction(function, fixed), len(given), found)(*given)

    def keep_whole(
        self, model: nn.Module, copied: nn.Module, kinds: Collection[type[nn.Module]]
    ) -> None:
        """Let each module of some kinds be one operator.

        Args:
            copied: the copy of the model that is exported.
        """
        twins = dict(copied.named_modules())
        for path, part in model.named_modules():
            if type(part) in kinds:
                twins[path].forward = partial(self._call_module, path, part, twins[path])

    def _call_module(
        self, path: str, module: nn.Module, twin: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        fixed = [None if k in places else x for k, x in enumerate(leaves)]
        given = [leaves[k] for k in places]
        weights = list(weights_of(twin).values())
        with disable_proxy_modes_tracing():
            call = WholeModule(module, fixed, structure, places)
            outputs, made = _outputs_like(call, given, weights)
        if not all(x is None or isinstance(x, bool | int | float | str) for x in fixed):
            raise ConstructError(
                f"module {path!r} loops over a sequence, so that it is one operator, but takes "
                "other values than tensors and numbers: give it tensors"
            )
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        found = tensors[0] if len(tensors) == 1 else tuple(tensors)
        results = self._define(call, len(given) + len(weights), found)(*given, *weights)
        rest = iter([results] if len(tensors) == 1 else results)
        return tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in outputs], made)

    def _define(self, call: OpaqueFunction, n_inputs: int, found: Any) -> Any:
        name = f"function_{len(self._made)}"
        inputs = ", ".join(f"Tensor x{k}" for k in range(n_inputs))
        outputs = (
            "Tensor" if isinstance(found, Tensor) else f"({', '.join(['Tensor'] * len(found))})"
        )

        def fake(*_: Tensor) -> Any:
            if isinstance(found, Tensor):
                return torch.empty_like(found)
            return tuple(map(torch.empty_like, found))

        self._library.define(f"{name}({inputs}) -> {outputs}")
        torch.library.register_fake(f"{self._namespace}::{name}", fake, lib=self._library)
        operator = getattr(getattr(torch.ops, self._namespace), name).default
        self._made[operator] = call
        return operator

    def insert(self, graph: fx.Graph) -> None:
        """Let the nodes of an exported graph call the functions themselves."""
        for node in graph.nodes:
            if node.target in self._made:
                node.target = self._made[node.target]


def _outputs_like(
    call: WholeModule, given: list[Tensor], weights: list[Tensor]
) -> tuple[list[Any], Any]:
    """Fake outputs of a module for fake inputs, and their structure, from runs on the meta device
    with two numbers of samples, because those with an open number take a hundred times longer."""

    def at(x: Tensor, n: int) -> Tensor:
        return torch.empty([size_of(k, n) for k in x.shape], dtype=x.dtype, device="meta")

    with _disable_current_modes(), torch.no_grad():
        (few, made), (more, _) = (
            tree_flatten(call.returned(*(at(x, n) for x in (*given, *weights)))) for n in _SIZES
        )
    sizes = [size for x in given for size in x.shape]
    n_open = next((k for k in sizes if tuple(size_of(k, n) for n in _SIZES) == _SIZES), None)
    outputs = list(few)
    for position, (one, other) in enumerate(zip(few, more, strict=True)):
        if isinstance(one, Tensor):
            shape = [
                a if a == b or n_open is None else n_open * (a // _SIZES[0])
                for a, b in zip(one.shape, other.shape, strict=True)
            ]
            outputs[position] = given[0].new_empty(shape, dtype=one.dtype)
    return outputs, made

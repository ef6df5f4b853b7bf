"""Keep calls of autograd functions in an export, which would trace through their forwards.

Each call becomes a custom operator during the export, and then one operator of the graph.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_leaves

from harness.runtime.tracing.constructs import ConstructError
from harness.runtime.tracing.functions import CustomFunction
from harness.runtime.tracing.patches import original_apply

_NAMESPACE = "harness_export"
_NUMBERS = count()


class ExportedFunctions:
    """The autograd functions that one export meets; the library defines their operators."""

    def __init__(self) -> None:
        self._library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        self._made: dict[Any, CustomFunction] = {}

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

    def _define(self, call: CustomFunction, n_inputs: int, found: Any) -> Any:
        name = f"function_{next(_NUMBERS)}"
        inputs = ", ".join(f"Tensor x{k}" for k in range(n_inputs))
        outputs = (
            "Tensor" if isinstance(found, Tensor) else f"({', '.join(['Tensor'] * len(found))})"
        )

        def fake(*_: Tensor) -> Any:
            if isinstance(found, Tensor):
                return torch.empty_like(found)
            return tuple(map(torch.empty_like, found))

        self._library.define(f"{name}({inputs}) -> {outputs}")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=self._library)
        operator = getattr(getattr(torch.ops, _NAMESPACE), name).default
        self._made[operator] = call
        return operator

    def insert(self, graph: fx.Graph) -> None:
        """Let the nodes of an exported graph call the functions themselves."""
        for node in graph.nodes:
            if node.target in self._made:
                node.target = self._made[node.target]

"""Walk a captured model node by node, and hand out each operator with its real inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.runtime.op_timer import Autocast, OperatorCall, as_leaves, tensors_in

# Gets an operator's name and how to run it by itself.
Visit = Callable[[str, OperatorCall], None]


class NodeWalk(fx.Interpreter):
    """Runs a traced model once, forward, and calls `visit` before each operator that is wanted.

    Values flow without gradients; which of them would carry one is followed beside them, so that
    each operator can be run by itself as training would run it.

    Args:
        module: traced, on the device of its inputs.
        names: of the operators, by node (`Captured.nodes` the other way round).
        wanted: names of the operators to visit.
        autocast: of the forward pass.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        names: dict[fx.Node, str],
        wanted: set[str],
        visit: Visit,
        autocast: Autocast,
    ) -> None:
        super().__init__(module)
        self._names = names
        self._wanted = wanted
        self._visit = visit
        self._autocast = autocast
        self._carrying: set[fx.Node] = set()

    def walk(self, *inputs: Tensor) -> Tensor:
        """The model's output, as a leaf that carries a gradient if it depends on parameters."""
        with torch.no_grad():
            output = self.run(*inputs)
        (last,) = self.graph.find_nodes(op="output")
        has_gradient = any(node in self._carrying for node in last.all_input_nodes)
        leaf: Tensor = tensors_in(as_leaves(output, has_gradient=has_gradient))[0]
        return leaf

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        if n.op == "get_attr":
            value = super().run_node(n)
            self._carry(n, isinstance(value, nn.Parameter) and value.requires_grad)
            return value
        parameters = self._parameters(n)
        name = self._names.get(n)
        if name is not None and name in self._wanted:
            args, kwargs = self._leaves(n)
            with torch.enable_grad():
                self._visit(name, OperatorCall(self._function(n), args, kwargs, parameters))
            del args, kwargs
        is_carried = any(node in self._carrying for node in n.all_input_nodes)
        self._carry(n, is_carried or any(p.requires_grad for p in parameters))
        with self._autocast():
            return super().run_node(n)

    def _carry(self, n: fx.Node, has_gradient: bool) -> None:
        if has_gradient:
            self._carrying.add(n)

    def _leaves(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A node's arguments with every input a leaf; one that stands twice stays one."""
        leaves = {
            node: as_leaves(self.env[node], has_gradient=node in self._carrying)
            for node in n.all_input_nodes
        }
        return fx.node.map_arg((n.args, n.kwargs), leaves.__getitem__)

    def _parameters(self, n: fx.Node) -> tuple[Tensor, ...]:
        if n.op != "call_module":
            return ()
        return tuple(self.fetch_attr(str(n.target)).parameters())

    def _function(self, n: fx.Node) -> Callable[..., Any]:
        if n.op == "call_module":
            module: Callable[..., Any] = self.fetch_attr(str(n.target))
            return module
        if n.op == "call_method":
            return lambda x, *args, **kwargs: getattr(x, str(n.target))(*args, **kwargs)
        function: Callable[..., Any] = n.target  # type: ignore[assignment]
        return function

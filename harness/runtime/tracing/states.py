"""Find the buffers that forward writes during tracing and pass their values through the graph.

read -> operators that use the value or compute the next one -> write
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.runtime.executor.shards.inplace import out_of_place, works_in_place
from harness.runtime.tracing.constructs import (
    ConstructError,
    ReadBuffer,
    WriteBuffer,
    copied,
    is_view,
)
from harness.runtime.tracing.patches import replaced

_COPYING = {"copy_": copied, "zero_": torch.zeros_like, "fill_": torch.full_like}


class States:
    """The buffers of the model that is traced.

    Args:
        names: buffers that are known to be written.

    Attributes:
        writes: newly found written buffers, each with the path of the module that writes it.
    """

    def __init__(self, tracer: Any, names: Collection[str]) -> None:
        self._tracer, self._names = tracer, names
        self._by_id: dict[int, str] = {}
        self._values: dict[str, fx.Node] = {}
        self._before: dict[str, fx.Node] = {}
        self._modules: dict[str, Any] = {}
        self.writes: dict[str, str] = {}

    @contextmanager
    def watched(self, root: nn.Module) -> Iterator[None]:
        """Record writes in the block; restore the model's buffers and attributes at its end."""
        held = [
            (module, f"{path}.{name}".lstrip("."), name, buffer, buffer._version, buffer.clone())
            for path, module in root.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        empty = [(one._buffers, set(one._buffers)) for one in root.modules()]
        self._by_id = {id(one[3]): one[1] for one in reversed(held)}
        self._modules = dict(root.named_modules())
        original = nn.Module.__setattr__
        assigned: list[tuple[nn.Module, str, Any]] = []

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if isinstance(value, fx.Proxy):
                if name in module._buffers or name in module._parameters:
                    self._assign(module, name, value)
                    return
                assigned.append((module, name, module.__dict__.get(name, self)))
            original(module, name, value)

        with replaced(nn.Module, "__setattr__", set_attribute):
            try:
                yield
            finally:
                for module, name, value in reversed(assigned):
                    module.__dict__.pop(name, None)
                    if value is not self:
                        module.__dict__[name] = value
                for buffers, names in empty:  # that forward registers or fills
                    for name in [n for n, b in buffers.items() if isinstance(b, fx.Proxy)]:
                        buffers.pop(name)
                        buffers |= dict.fromkeys({name} & names)
                for module, path, name, buffer, version, value in held:
                    is_other = module._buffers.get(name) is not buffer
                    if is_other or buffer._version != version:
                        self.writes.setdefault(path, path.rpartition(".")[0])
                        module._buffers[name] = buffer
                        with torch.no_grad():
                            buffer.copy_(value)

    def current(self, buffer: Tensor) -> Any:
        """The value of a written buffer at this point of forward; None for other tensors."""
        name = self._by_id.get(id(buffer))
        if name is None or name not in self._names:
            return None
        if name not in self._values:
            held = self._tracer.create_proxy("get_attr", name, (), {})
            read = self._tracer.create_proxy("call_function", ReadBuffer(name), (held,), {})
            self._values[name] = self._before[name] = read.node
        return self._tracer.proxy(self._values[name])

    def _assign(self, module: nn.Module, name: str, value: fx.Proxy) -> None:
        path = f"{self._tracer.path_of_module(module)}.{name}".lstrip(".")
        if not isinstance(module._buffers.get(name), Tensor):
            raise ConstructError(
                f"forward assigns {path!r}, which is a parameter or has no value before: make it a "
                "buffer that has one"
            )
        name = self._by_id[id(module._buffers[name])]
        if name in self._names:
            self._values[name] = value.node
        else:
            self.writes[name] = self._tracer.module_path

    def record(self, node: fx.Node) -> None:
        """Record a node that writes a buffer in place; make it out of place if the graph passes
        the buffer's value on."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source.op == "placeholder":
            return
        is_item = node.op == "call_method" and node.target == "__setitem__"
        if not is_item and not works_in_place(node, self._modules):
            return
        if source.op == "get_attr":
            name = str(source.target)
            if name in {known for known, _ in self._tracer.root.named_parameters()}:
                raise ConstructError(f"forward changes the parameter {name!r} in place")
            if name in self._by_id.values():
                self.writes[name] = self._tracer.module_path
        elif source in self._values.values():
            if node.op == "call_method" and node.target in _COPYING:
                copying: Any = _COPYING[str(node.target)]
                node.op, node.target = "call_function", copying
            else:
                out_of_place(node, self._modules)
            self._values |= {k: node for k, value in self._values.items() if value is source}
        elif (viewed := self._viewed(source)) is not None:
            raise ConstructError(
                f"forward changes a view of the buffer {viewed!r} in place: assign to it"
            )

    def _viewed(self, node: fx.Node) -> str | None:
        """The written buffer that a node is a view of, or None."""
        while is_view(node) and node.args and isinstance(node.args[0], fx.Node):
            node = node.args[0]
            for name, value in self._values.items():
                if value is node:
                    return name
        return None

    def write(self, graph: fx.Graph) -> None:
        """Insert writes of the final values at the end of forward."""
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            for name, value in self._values.items():
                if value is not self._before.get(name):
                    graph.call_function(WriteBuffer(name), (graph.get_attr(name), value))

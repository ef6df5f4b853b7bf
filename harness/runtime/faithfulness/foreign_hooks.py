"""Find hooks of an operator's module that use tensors of other operators, which a strategy may
place on another device, cut or leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from harness.runtime.capture.saved import tensors_within
from harness.runtime.tracing.hooks import has_own_hooks

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    named = module.named_parameters(), module.named_buffers()
    return {name: tensor for each in named for name, tensor in each}


@contextmanager
def watched_hooks(module: fx.GraphModule, model: nn.Module) -> Iterator[dict[str, str]]:
    """Watch the hooks of a graph's operators in the block.

    Yields:
        The operator whose hook used a tensor of another one, by the tensor's name; filled by runs.
    """
    found: dict[str, str] = {}
    tables: list[tuple[Any, dict[int, Any]]] = []
    all_tensors = _tensors_of(model) | _tensors_of(module)
    for target in dict.fromkeys(str(n.target) for n in module.graph.nodes if n.op == "call_module"):
        operator = module.get_submodule(target)
        own = {id(tensor) for tensor in _tensors_of(operator).values()}
        others = {id(x): name for name, x in all_tensors.items() if id(x) not in own}
        watch = _Watch(target, others, found)
        for part in operator.modules():
            if has_own_hooks(part):
                of_part = [getattr(part, kind) for kind in _KINDS]
                tables += [(table, dict(table)) for table in of_part]
                for table in of_part:
                    table.update({key: watch.watching(hook) for key, hook in table.items()})
    try:
        yield found
    finally:
        for table, hooks in tables:
            table.update(hooks)


class _Watch(TorchFunctionMode):
    """Notes the tensors of other operators that one operator's hooks use."""

    def __init__(self, target: str, others: Mapping[int, str], found: dict[str, str]) -> None:
        super().__init__()
        self._target, self._others, self._found = target, others, found

    def watching(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return hook(*args, **kwargs)

        return call

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_within((args, kwargs or {})):
            if id(tensor) in self._others:
                self._found.setdefault(self._others[id(tensor)], self._target)
        return func(*args, **(kwargs or {}))

"""Record a model's torch.autocast contexts during tracing and run its operators in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from harness.runtime.capture.operators import function_name
from harness.runtime.tracing.constructs import AUTOCAST, CALLS, is_view
from harness.runtime.tracing.patches import autocast_on_meta, replaced
from harness.runtime.tracing.regions import AutocastFunction, AutocastModule, AutocastRegion

# Functions whose output dtype autocast does not change.
_UNAFFECTED = (
    "size",
    "dim",
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
    "type",
    "contiguous",
    "detach",
)


class Regions:
    """The stack of autocast contexts that are open at a point of tracing."""

    def __init__(self) -> None:
        self._entered: list[AutocastRegion] = []

    @property
    def innermost(self) -> AutocastRegion | None:
        return self._entered[-1] if self._entered else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Patch torch.autocast to keep the stack up to date."""
        enter: Any = torch.autocast.__enter__
        leave: Any = torch.autocast.__exit__
        on_meta: WeakKeyDictionary[Any, AutocastRegion] = WeakKeyDictionary()

        def created(context: Any, dtype: Any, is_enabled: bool) -> None:
            on_meta[context] = AutocastRegion("meta", dtype, is_enabled)

        def entered(context: Any) -> Any:
            region = AutocastRegion(context.device, context.fast_dtype, context._enabled)
            self._entered.append(on_meta.get(context, region))
            return enter(context)

        def left(context: Any, *args: Any) -> Any:
            self._entered.pop()
            return leave(context, *args)

        with ExitStack() as stack:
            stack.enter_context(autocast_on_meta(created))
            stack.enter_context(replaced(torch.autocast, "__enter__", entered))
            stack.enter_context(replaced(torch.autocast, "__exit__", left))
            yield


def keep_regions(module: fx.GraphModule) -> None:
    """Wrap every operator traced under autocast in its region."""
    for node in list(module.graph.nodes):
        region = node.meta.get(AUTOCAST)
        if region is None or node.op not in CALLS or is_view(node):
            continue
        if node.op == "call_module":
            path = f"{node.target}_autocast_{region}"
            inner = module.get_submodule(str(node.target))
            module.add_submodule(path, AutocastModule(inner, region))
            node.target = path
        elif function_name(node.target) not in _UNAFFECTED:
            target: Any = AutocastFunction(function_name(node.target), node.target, region)
            node.op, node.target = "call_function", target
    module.recompile()

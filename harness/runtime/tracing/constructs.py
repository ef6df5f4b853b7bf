"""Marks in the `meta` of traced nodes, for facts that an operator's target does not show."""

from __future__ import annotations

from torch import fx

from harness.errors import ModelError
from harness.runtime.capture.operators import function_name

# Keys of `Node.meta`: computed with gradients off; is the `data` of a tensor; hooks on its
# gradient; whether it writes a buffer.
NO_GRAD = "harness_no_grad"
IS_DATA = "harness_is_data"
HOOKS = "harness_hooks"
WRITES = "harness_writes"
AUTOCAST = "harness_autocast"
# Key of `GraphModule.meta`: names of the buffers that forward writes.
WRITTEN = "harness_written"

CALLS = ("call_function", "call_method", "call_module")
_VIEWS = (
    "getitem", "view", "reshape", "transpose", "permute", "t", "narrow", "select", "squeeze",
    "unsqueeze", "expand", "chunk", "split", "unbind", "flatten", "detach", "diagonal", "getattr",
)  # fmt: skip


class ConstructError(ModelError):
    """The model uses a construct that a graph cannot represent."""


def is_view(node: fx.Node) -> bool:
    """Whether a node may share memory with its first argument."""
    return node.op in CALLS and function_name(node.target) in _VIEWS

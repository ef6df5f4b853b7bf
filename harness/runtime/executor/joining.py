"""For which products a step's microbatches are joined.

Decided from the layout, not from a device's own tasks: devices that hold the same weights then have
their gradients at the same time.
"""

from __future__ import annotations

import math

from torch import nn

from harness.runtime.executor.deferred import is_worth_joining
from harness.runtime.executor.layout import Layout, Part


def is_joined(layout: Layout, operator: str, path: str, module: nn.Module, n_alike: int) -> bool:
    """Whether one product gives the gradients of all microbatches of a size.

    Args:
        path: where a segment has the module; the model's own have the path that they have there.
        n_alike: microbatches of this size.
    """
    if n_alike == 1 or _is_called_again(layout, path):
        return False
    largest = max(_fed_bytes(layout, part) for part in layout.parts[operator])
    return is_worth_joining(module, n_alike * largest)


def _is_called_again(layout: Layout, path: str) -> bool:
    """Whether some device has several tasks that call a module of the model."""
    callers = [
        name
        for name, node in layout.captured.nodes.items()
        if node.op == "call_module" and node.target == path
    ]
    devices = [part.device for name in callers for part in layout.parts[name]]
    return len(set(devices)) < len(devices)


def _fed_bytes(layout: Layout, part: Part) -> int:
    """Of a task's inputs and outputs."""
    regions = [(want.value, want.block) for _, want in layout.reads(part)]
    node = layout.captured.nodes[part.operator]
    if node in layout.values.tensors:
        regions.append((node.name, layout.region(node, part)))
    return sum(
        math.prod(layout.sizes_of(value, region)) * layout.tensor(value).dtype.itemsize
        for value, region in regions
    )

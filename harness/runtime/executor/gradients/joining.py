"""For which products a step's microbatches are joined.

Decided from the layout, not from a device's own tasks: devices that hold the same weights then have
their gradients at the same time.
"""

from __future__ import annotations

import math

from torch import nn

from harness.runtime.executor.geometry.layout import Layout, Part
from harness.runtime.executor.gradients.deferred import Call, is_worth_joining


class Joining:
    """What joins the microbatches of a step, of whatever size.

    Args:
        layout: of the largest microbatch.
        n_microbatches: of a step.
    """

    def __init__(self, layout: Layout, n_microbatches: int) -> None:
        self._layout, self.n_microbatches = layout, n_microbatches
        self._calls: dict[str, list[Call]] = {}

    def includes(self, operator: str, path: str, module: nn.Module) -> bool:
        """Whether one product gives the gradients of all microbatches.

        Args:
            path: where a segment has the module; the model's own have theirs.
        """
        if self.n_microbatches == 1 or _is_called_again(self._layout, path):
            return False
        largest = max(_fed_bytes(self._layout, part) for part in self._layout.parts[operator])
        return is_worth_joining(module, self.n_microbatches * largest)

    def calls(self, path: str) -> list[Call]:
        """Where the calls of a step are kept that have come so far, those of all sizes."""
        return self._calls.setdefault(path, [])


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

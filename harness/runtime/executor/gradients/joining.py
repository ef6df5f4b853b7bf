"""Decide which weight gradients join the microbatches of a step.

The decision depends on the layout only, not on the device, so that devices with the same weights
have their gradients at the same time.
"""

from __future__ import annotations

import math

from torch import nn

from harness.runtime.executor.geometry.layout import Layout, Part
from harness.runtime.executor.gradients.deferred import Call, is_worth_joining


class Joining:
    """The joined calls of a step, over all microbatch sizes.

    Args:
        layout: layout of the largest microbatch.
        n_microbatches: microbatches per step.
    """

    def __init__(self, layout: Layout, n_microbatches: int) -> None:
        self._layout, self.n_microbatches = layout, n_microbatches
        self._calls: dict[str, list[Call]] = {}

    def includes(self, operator: str, path: str, module: nn.Module) -> bool:
        """Whether to compute the module's gradients of all microbatches by one product.

        Args:
            path: the module's path in its segment; in the model, for modules of the model.
        """
        if self.n_microbatches == 1 or _is_called_again(self._layout, path):
            return False
        largest = max(_io_bytes(self._layout, part) for part in self._layout.parts[operator])
        return is_worth_joining(module, self.n_microbatches * largest)

    def calls(self, path: str) -> list[Call]:
        """The list of calls kept so far in this step, of all microbatch sizes."""
        return self._calls.setdefault(path, [])


def _is_called_again(layout: Layout, path: str) -> bool:
    """Whether any device has several tasks that call the model's module at `path`."""
    callers = [
        name
        for name, node in layout.captured.nodes.items()
        if node.op == "call_module" and node.target == path
    ]
    devices = [part.device for name in callers for part in layout.parts[name]]
    return len(set(devices)) < len(devices)


def _io_bytes(layout: Layout, part: Part) -> int:
    """Bytes of a task's inputs and outputs."""
    regions = [(want.value, want.block) for _, want in layout.reads(part)]
    node = layout.captured.nodes[part.operator]
    if node in layout.values.tensors:
        regions.append((node.name, layout.region(node, part)))
    return sum(
        math.prod(layout.sizes_of(value, region)) * layout.tensor(value).dtype.itemsize
        for value, region in regions
    )

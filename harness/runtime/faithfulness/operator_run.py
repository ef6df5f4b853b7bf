"""Run a captured graph operator by operator, as the executor does on one device."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from harness.runtime.capture.capture import Captured
from harness.runtime.executor.geometry.values import MetaModel


class OperatorRun(fx.Interpreter):
    """Runs the operators of a graph; nodes without tensors, such as sizes, take the values of the
    meta run instead, so their side effects do not happen.

    Args:
        samples: batch size.
    """

    def __init__(self, captured: Captured, meta: MetaModel, samples: int) -> None:
        super().__init__(captured.module)
        self._constants = meta.at(samples).constants

    def run_node(self, n: fx.Node) -> Any:
        if n.op.startswith("call") and n in self._constants:
            return self._constants[n]
        return super().run_node(n)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The first tensor, from which the executor computes the loss."""
        return first_tensor(args[0])


def first_tensor(value: Any) -> Any:
    """The first tensor among outputs; None if there is none."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, tuple, list)):
        return None
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)

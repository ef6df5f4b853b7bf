"""The gradients that each operator computes once some operators are frozen.

    frozen prefix            first trained         trained
    forward | no backward    weights alone         weights and inputs

Gradients do not travel into the prefix, because nothing there is trained. A frozen operator that is
not in the prefix, which tied weights make possible, passes gradients on and has none of its own.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from harness.domain.graph import Graph, Operator

Gradients = Literal["all", "inputs", "weights", "none"]

# Modules that evaluation mode turns off.
_DROPOUTS = ("Dropout", "Dropout2d")


def is_product(operator: Operator) -> bool:
    """Whether it multiplies by weights, whose gradients the executor may defer."""
    pads_zeros = operator.attrs.get("padding_mode", "zeros") == "zeros"
    return operator.kind in ("linear", "conv2d") and operator.parameter_bytes > 0 and pads_zeros


def needs_gradient(graph: Graph, frozen: frozenset[str] = frozenset()) -> npt.NDArray[np.bool_]:
    """Whether each operator, or any operator before it, has weights to train."""
    needs = np.zeros(len(graph.operators), dtype=np.bool_)
    for i, producers in enumerate(graph.producers()):
        operator = graph.operators[i]
        is_trained = operator.weight_bytes > 0 and operator.name not in frozen
        needs[i] = is_trained or any(needs[p] for p in producers)
    return needs


def gradients_of(graph: Graph, frozen: frozenset[str]) -> list[Gradients]:
    """The gradients that each operator computes."""
    before, after = needs_gradient(graph), needs_gradient(graph, frozen)
    return [
        _gradients(
            operator,
            is_frozen=operator.name in frozen,
            needs=bool(after[i] or not before[i]),
            loses_inputs=any(before[p] for p in producers) and not any(after[p] for p in producers),
        )
        for i, (operator, producers) in enumerate(
            zip(graph.operators, graph.producers(), strict=True)
        )
    ]


def _gradients(
    operator: Operator, *, is_frozen: bool, needs: bool, loses_inputs: bool
) -> Gradients:
    if not needs:
        return "none"
    if not is_product(operator):
        return "all"
    if is_frozen:
        return "inputs"
    return "weights" if loses_inputs else "all"


def passes_s(
    operator: Operator,
    gradients: Gradients,
    *,
    is_frozen: bool,
    forward_s: float,
    backward_s: float,
) -> tuple[float, float]:
    """Seconds of both passes, of which a profile measured both gradients.

    The input gradients of a product take as long as its forward pass, which has as many FLOPs.
    """
    to_inputs_s = min(forward_s, backward_s)
    taken_s = {
        "all": backward_s,
        "inputs": to_inputs_s,
        "weights": backward_s - to_inputs_s,
        "none": 0.0,
    }[gradients]
    is_off = is_frozen and operator.attrs.get("function") in _DROPOUTS
    return 0.0 if is_off else forward_s, taken_s

"""Freezing of layers while training: which layers a graph has, and how many are frozen when.

PipeTransformer (He et al., ICML 2021) freezes a prefix that grows by a share alpha of the layers
that are still trained: F(T) = F(T-1) + alpha (L - F(T-1)), so F(T) = ceil(L (1 - (1 - alpha)^T)).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from harness.domain.graph import Graph, Operator
from harness.domain.sharding import has_tasks


def n_frozen_layers(n_layers: int, alpha: float, interval: int) -> int:
    """F(T): the number of frozen layers after T intervals.

    Args:
        n_layers: L, the layers that may be frozen.
        alpha: share of the trained layers that each interval freezes.
        interval: T, from 0.
    """
    # Rounded, because ceil would turn 4.000000000000001 into 5.
    return math.ceil(round(n_layers * (1 - (1 - alpha) ** interval), 9))


def n_frozen_by_norms(alpha: float, n_frozen: int, norms: Sequence[float]) -> int:
    """Freeze up to the trained layer of the least gradient, and a share of the trained at most.

    Args:
        alpha: share of the trained layers that may be frozen at once.
        n_frozen: layers that are frozen already.
        norms: of each layer's gradient; those of frozen layers do not matter.
    """
    bound = n_frozen + n_frozen_layers(len(norms) - n_frozen, alpha, 1)
    least = min(range(n_frozen, len(norms)), key=lambda layer: norms[layer], default=n_frozen)
    return min(bound, least + 1)


class FreezingState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of freezing by gradients between two steps, which a saved state holds.

    Attributes:
        since: the step from which all layers were trained last.
        interval: intervals since then that have been decided on.
        n_frozen: frozen layers after the last of them.
        squares: of each layer's gradient, the sum over the steps since that decision.
        n_steps: their number.
    """

    since: int = 0
    interval: int = 0
    n_frozen: int = 0
    squares: list[float]
    n_steps: int = 0


@dataclass(frozen=True)
class FreezableLayer:
    """Operators that are frozen together, with their modules and parameters."""

    operators: tuple[str, ...]
    modules: frozenset[str]
    parameters: frozenset[str]


def freezable_layers(graph: Graph) -> list[FreezableLayer]:
    """The layers of a model, from its inputs, without the head, which is never frozen.

    A layer is named by the first part of a parameter's path that ends with a digit, such as
    `encoder.layers.3` or `features.0`. Operators without such a name belong to the layer before
    them, or to the first. The head begins at the first parameters after the last layer; if there
    are none, the last layer is the head.
    """
    names: list[str] = []
    members: list[list[Operator]] = []
    operators = list(filter(has_tasks, graph.operators))
    for at, operator in enumerate(operators):
        name = _layer_name(operator)
        if name is not None and name not in names:
            names.append(name)
            members.append([] if members else operators[:at])  # such as an embedding
        if members:
            members[-1 if name is None else names.index(name)].append(operator)
    if not members:
        return []
    *others, last = members
    end = max(at for at, op in enumerate(last) if _layer_name(op) is not None)
    later = [op for op in last[end:] if _parameters(op) and _layer_name(op) is None]
    kept = last[: last.index(later[0])] if later else []
    trained = _layer(last[len(kept) :]).parameters
    layers = [_layer(own) for own in (*others, kept) if own]
    # Parameters that the head uses too are trained to the end.
    return [replace(layer, parameters=layer.parameters - trained) for layer in layers]


def frozen_operators(graph: Graph, n_frozen: int) -> frozenset[str]:
    """The operators that are not trained once the first `n_frozen` layers are frozen.

    An operator that shares a parameter with the head stays trained.
    """
    layers = freezable_layers(graph)[:n_frozen] if n_frozen else []
    names = frozenset[str]().union(*(layer.parameters for layer in layers))
    operators = {operator.name: operator for operator in graph.operators}
    return frozenset(
        name
        for layer in layers
        for name in layer.operators
        if names.issuperset(_parameters(operators[name]))
    )


def _layer_name(operator: Operator) -> str | None:
    paths = _parameters(operator)
    parts = paths[0].split(".") if paths else []
    for at, part in enumerate(parts[:-1]):
        if part[-1:].isdigit():
            return ".".join(parts[: at + 1])
    return None


def _parameters(operator: Operator) -> list[str]:
    found = operator.attrs.get("parameters", [])
    return [str(name) for name in found] if isinstance(found, list) else []


def _layer(operators: list[Operator]) -> FreezableLayer:
    return FreezableLayer(
        operators=tuple(operator.name for operator in operators),
        modules=frozenset(str(op.attrs["module"]) for op in operators if "module" in op.attrs),
        parameters=frozenset(name for op in operators for name in _parameters(op)),
    )

"""Operators of a graph that are cut together: linear ones in a row, and mixtures of experts.

Of two linear ones the first is cut by its output features, the second by its contraction over the
same devices: each device has just the features that its part of the second reads, so nothing
travels between them and only the second's partial sums are added up (Shoeybi et al., "Megatron-LM",
2019).
"""

from typing import NamedTuple

from harness.domain.einsum import expert_dim
from harness.domain.graph import Graph
from harness.domain.sharding import CONTRACTION, full_shape


class Pair(NamedTuple):
    """Positions of two linear operators and of elementwise ones, in order.

    Attributes:
        between: also other linear operators, whose outputs meet the first's (SwiGLU's gate).
        after: those that follow the second, up to the first that another one reads beside.
    """

    first: int
    between: tuple[int, ...]
    second: int
    after: tuple[int, ...]


def linear_pairs(graph: Graph) -> list[Pair]:
    """All pairs; an operator may be the second of one and the first of another."""
    index = graph.index()
    found = []
    for second, operator in enumerate(graph.operators):
        if operator.kind != "linear":
            continue
        if CONTRACTION not in full_shape(operator, batch=1, graph_batch=None):
            continue
        cone = _cone(graph, index, index[operator.inputs[0]])
        if cone is not None:
            first = next(at for at in sorted(cone) if graph.operators[at].kind == "linear")
            between = tuple(sorted(cone - {first}))
            found.append(Pair(first, between, second, _after(graph, second)))
    return found


def _cone(graph: Graph, index: dict[str, int], at: int) -> set[int] | None:
    """An operator and those that lead to it from linear ones, elementwise; None if others do."""
    operator = graph.operators[at]
    if operator.kind == "linear":
        return {at}
    sources = [index[name] for name in operator.inputs]
    if operator.kind not in ("elementwise", "add") or not sources:
        return None
    found = {at}
    for source in sources:
        before = _cone(graph, index, source)
        if before is None or graph.operators[source].shape != operator.shape:
            return None
        found |= before
    return found


def _after(graph: Graph, second: int) -> tuple[int, ...]:
    found, consumers = [second], graph.consumers()
    while len(readers := consumers[found[-1]]) == 1:
        reader = graph.operators[readers[0]]
        if reader.kind != "elementwise" or len(reader.inputs) != 1:
            break
        found.append(readers[0])
    return tuple(found[1:])


def contracted(graph: Graph) -> set[int]:
    """Linear operators to cut by contraction: every second one of a row, from its second on."""
    second: set[int] = set()
    for pair in linear_pairs(graph):
        if second.isdisjoint((pair.first, *pair.between)):
            second.add(pair.second)
    return second


class Experts(NamedTuple):
    """The dims along which operators of a mixture are cut with its experts, by their names.

    Attributes:
        inside: products by the experts' weights, and elementwise operators between them.
        around: products that give experts their tokens, and those that add up their results.
    """

    inside: dict[str, str]
    around: dict[str, str]


def experts_of(graph: Graph) -> Experts:
    """The operators of all mixtures of experts."""
    operators = {op.name: op for op in graph.operators}
    found = Experts({}, {})
    for op in graph.operators:
        before = [operators[name] for name in op.inputs]
        dims = {found.inside.get(one.name) for one in before if one.shape == op.shape}
        is_between = op.kind in ("elementwise", "add") and len(dims) == 1
        dim = expert_dim(op) or (dims.pop() if is_between else None)
        if dim is not None:
            found.inside[op.name] = dim
            found.around.update((one.name, dim) for one in before if one.kind == "einsum")
        elif op.kind == "einsum" and not found.inside.keys().isdisjoint(op.inputs):
            found.around[op.name] = CONTRACTION
    for name in found.inside:
        found.around.pop(name, None)
    return found

"""FlexFlow's entries as a `Strategy` and back, matched by name, else by kind and order."""

from __future__ import annotations

from collections.abc import Sequence

from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, n_parts
from harness.domain.sharding import cuttable_dims, full_units, has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import StrategyError
from harness.plan.builders import cut_or_whole
from harness.plan.formats.flexflow import DimOrder, Entry
from harness.plan.report import describe_plans

# FlexFlow's words for kinds of operators, as its default names begin.
_KINDS = {
    "dense": "linear",
    "linear": "linear",
    "conv": "conv2d",
    "conv2d": "conv2d",
    "pool": "pool",
    "pool2d": "pool",
    "flat": "flatten",
    "embed": "embedding",
    "embedding": "embedding",
    "concat": "cat",
    "elementunary": "elementwise",
    "multiheadattention": "attention",
    "softmax": "softmax",
    "batchnorm": "batch_norm",
    "mse_loss": "loss",
    "lstm": "lstm",
    "add": "add",
}


def kind_from_name(name: str) -> str:
    """The operator's kind by FlexFlow's naming: `Dense_100`, `Dense_512_100` and `linear1` are
    linear."""
    return _KINDS.get(name.lower().rstrip("0123456789-_"), "other")


def describe_entries(entries: Sequence[Entry], order: DimOrder = "innermost_first") -> str:
    """Name a strategy by its content, such as `data-parallel MLPs, whole tables on devices`."""
    return describe_plans(
        (kind_from_name(e.name), dict(e.shown_cuts(order)), list(e.devices)) for e in entries
    )


def strategy_from_entries(
    entries: Sequence[Entry], graph: Graph, *, batch: int, order: DimOrder = "innermost_first"
) -> Strategy:
    """Lay entries over a graph.

    Names are matched; if none is known, operators of equal kind are matched in order. Operators
    that FlexFlow fuses into others (activations, losses, ...) follow their first producer.

    Raises:
        StrategyError: an entry without an operator, or an operator that nothing places.
    """
    entry_of = _match(entries, graph)
    plans: dict[str, OperatorPlan] = {}
    for operator in graph.operators:
        if not has_tasks(operator):
            continue
        entry = entry_of.get(operator.name)
        if entry is not None:
            cuts = {dim: n for dim, n in entry.cuts(order, [*operator.shape]).items() if n > 1}
            plans[operator.name] = OperatorPlan(dict(cuts), list(entry.devices))
        else:
            plans[operator.name] = _follow(operator, plans, graph, batch)
    return Strategy(name=describe_entries(entries, order), batch=batch, operators=plans)


def _match(entries: Sequence[Entry], graph: Graph) -> dict[str, Entry]:
    known = {op.name: op for op in graph.operators if has_tasks(op)}
    by_name = {entry.name: entry for entry in entries if entry.name in known}
    if len(by_name) == len(entries):
        return by_name
    if by_name:
        foreign = next(entry.name for entry in entries if entry.name not in known)
        raise StrategyError(
            f"graph {graph.name!r} has no operator {foreign!r}, though it has "
            f"{len(by_name)} of the strategy's {len(entries)}: the strategy is for another model"
        )
    matched: dict[str, Entry] = {}
    for kind in dict.fromkeys(kind_from_name(entry.name) for entry in entries):
        own = [entry for entry in entries if kind_from_name(entry.name) == kind]
        found = [op.name for op in known.values() if op.kind == kind]
        if len(own) != len(found):
            raise StrategyError(
                f"the strategy has {len(own)} operators of kind {kind}, graph {graph.name!r} has "
                f"{len(found)}: it is for another model"
            )
        matched.update(zip(found, own, strict=True))
    return matched


def _follow(
    operator: Operator, plans: dict[str, OperatorPlan], graph: Graph, batch: int
) -> OperatorPlan:
    """The plan of the first placed producer where the operator can be cut that way; else by samples
    over its devices; else whole."""
    source = next((plans[name] for name in operator.inputs if name in plans), None)
    if source is None:
        raise StrategyError(
            f"the strategy does not place operator {operator.name!r} of {graph.name!r}"
        )
    shape = full_units(operator, batch=batch, graph_batch=graph.batch)
    allowed = cuttable_dims(operator, shape)
    if all(dim in allowed and shape[dim] >= n_parts(cut) for dim, cut in source.partition.items()):
        return source
    devices = sorted(set(source.devices))
    return cut_or_whole(operator, graph, batch, SAMPLE, len(devices), devices)


def entries_from_strategy(strategy: Strategy, graph: Graph) -> list[Entry]:
    """Write a strategy as FlexFlow's entries, innermost dim first.

    Raises:
        StrategyError: unequal shares, dims that FlexFlow does not know, several microbatches or
            stages: which the format cannot hold.
    """
    if strategy.n_microbatches > 1 or len(strategy.stages) > 1:
        raise StrategyError(
            f"strategy {strategy.name!r} has {strategy.n_microbatches} microbatches and "
            f"{len(strategy.stages)} stages: FlexFlow's files hold neither"
        )
    entries = []
    for operator in graph.operators:
        plan = strategy.operators.get(operator.name)
        if plan is None:
            continue
        unequal = [cut for cut in plan.partition.values() if isinstance(cut, list)]
        if unequal:
            raise StrategyError(
                f"operator {operator.name!r} is cut into shares {unequal[0]}: FlexFlow's files "
                "hold "
                "equal parts only"
            )
        dims = list(operator.shape) or [SAMPLE]
        extra = [d for d, cut in plan.partition.items() if d not in dims and n_parts(cut) > 1]
        if extra or len(dims) > 4:
            raise StrategyError(
                f"operator {operator.name!r} is cut along {extra or dims}: FlexFlow's files "
                "cannot say so"
            )
        sizes = tuple(n_parts(plan.partition.get(dim, 1)) for dim in reversed(dims))
        entries.append(Entry(operator.name, sizes, tuple(plan.devices), 0))
    return entries

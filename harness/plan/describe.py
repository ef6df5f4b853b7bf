"""Name a strategy by its partition of each kind of operator, in a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from harness.domain.graph import Graph
from harness.domain.partition import REPLICA, SAMPLE, Cut, n_parts
from harness.domain.sharding import has_tasks
from harness.domain.strategy import Strategy

# Kinds that say something about a strategy: the others follow them.
_TELLING = ("conv2d", "linear", "embedding", "attention", "lstm")
_PLURALS = {
    "conv2d": "convolutions",
    "linear": "MLPs",
    "embedding": "tables",
    "attention": "attention",
    "lstm": "LSTMs",
}


def style(cuts: Mapping[str, Cut], devices: list[int]) -> str:
    """One operator's parallelism: `whole`, `data-parallel`, `sample-by-feature-parallel`."""
    cut = [dim for dim, parts in cuts.items() if n_parts(parts) > 1]
    if not cut:
        return "whole"
    if cut == [REPLICA]:
        return "replicated"
    if cut == [SAMPLE]:
        return "data-parallel" if len(set(devices)) > 1 else "whole"
    return f"{cut[0]}-parallel" if len(cut) == 1 else "-by-".join(cut) + "-parallel"


def describe_plans(plans: Iterable[tuple[str, Mapping[str, Cut], list[int]]]) -> str:
    """Summarise (kind, cuts, devices) of all operators, such as
    `data-parallel MLPs, whole tables on devices`."""
    styles: dict[str, Counter[str]] = {}
    places: set[int] = set()
    for kind, cuts, devices in plans:
        places.update(devices)
        styles.setdefault(kind, Counter())[style(cuts, devices)] += 1
    telling = {kind: styles[kind] for kind in styles if kind in _TELLING} or styles
    if len(places) == 1:
        return "single device"
    phrases = []
    for kind, counts in telling.items():
        for name, _ in counts.most_common():
            noun = _PLURALS.get(kind, kind)
            share = "" if len(counts) == 1 else f" ({counts[name]} of {counts.total()})"
            phrases.append(f"{name} {noun}{share}{' on devices' if name == 'whole' else ''}")
    return ", ".join(phrases)


def describe_strategy(strategy: Strategy, graph: Graph) -> str:
    """Name a strategy, with its stages, replicas and microbatches when it has several."""
    plans = [
        (op.kind, strategy.operators[op.name].partition, strategy.operators[op.name].devices)
        for op in graph.operators
        if has_tasks(op)
    ]
    text = describe_plans(plans)
    if len(strategy.stages) > 1:
        replicas = "-".join(str(len(devices)) for devices in strategy.stage_devices())
        text = f"{len(strategy.stages)} stages on {replicas} devices, {text}"
    if strategy.n_microbatches > 1:
        text += f", {strategy.n_microbatches} microbatches ({strategy.schedule})"
    if strategy.optimizer_state == "sharded":
        text += ", sharded optimizer"
    return text

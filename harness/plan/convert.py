"""Strategy files from one format to another, as `python -m harness.plan convert` does."""

from __future__ import annotations

from collections.abc import Callable

from harness.domain.graph import Graph
from harness.domain.strategy import Strategy, check_names
from harness.errors import ConfigError
from harness.plan.formats.convert import entries_from_strategy, strategy_from_entries
from harness.plan.formats.detect import Imported
from harness.plan.formats.flexflow import DimOrder, Entry, print_console, print_text
from harness.plan.formats.flexflow_protobuf import print_protobuf
from harness.plan.formats.pipedream_plan import PipeDreamPlan, from_strategy, to_strategy

_FLEXFLOW: dict[str, Callable[[list[Entry]], bytes]] = {
    "flexflow-console": lambda entries: print_console(entries).encode(),
    "flexflow-text": lambda entries: print_text(entries).encode(),
    "flexflow-v1": lambda entries: print_protobuf(entries, "v1"),
    "flexflow-r21": lambda entries: print_protobuf(entries, "r21"),
}
FORMATS = ("harness", *_FLEXFLOW, "pipedream")


def convert(
    imported: Imported,
    to: str,
    *,
    graph: Graph | None = None,
    batch: int | None = None,
    order: DimOrder = "innermost_first",
) -> bytes:
    """The file's bytes in another format.

    Args:
        graph: needed from or to harness; for a PipeDream plan it says each operator's stage.
        batch: of a strategy of another project; the graph's when None.
        order: of the dims of a FlexFlow file that is read.

    Raises:
        ConfigError: the graph or the batch is needed and missing, or the strategy has another.
        StrategyError: the format cannot hold the strategy, or it is for another graph.
    """
    content = imported.content
    if to in _FLEXFLOW and isinstance(content, list):
        return _FLEXFLOW[to](content)
    if to == "pipedream" and isinstance(content, PipeDreamPlan):
        return content.to_json()
    strategy = strategy_from(imported, graph, batch, order)
    if to in _FLEXFLOW:
        return _FLEXFLOW[to](entries_from_strategy(strategy, _needed(graph, f"--to {to}")))
    return from_strategy(strategy).to_json() if to == "pipedream" else strategy.to_json()


def strategy_from(
    imported: Imported,
    graph: Graph | None,
    batch: int | None,
    order: DimOrder = "innermost_first",
) -> Strategy:
    """Convert a file of any format into a strategy; arguments and errors as for `convert`."""
    content = imported.content
    if isinstance(content, Strategy):
        if batch not in (None, content.batch):
            raise ConfigError(
                f"--batch-size {batch}: strategy {content.name!r} has a batch of {content.batch}: "
                "leave out --batch-size"
            )
        if graph is not None:
            check_names(content, graph)
        return content
    graph = _needed(graph, "a file of another project")
    batch = batch or graph.batch
    if batch is None:
        raise ConfigError("the graph does not say its batch: give --batch-size B, samples per step")
    if isinstance(content, list):
        return strategy_from_entries(content, graph, batch=batch, order=order)
    stages = {op.name: op.attrs.get("stage_id") for op in graph.operators}
    stage_of = {name: stage for name, stage in stages.items() if isinstance(stage, int)}
    return to_strategy(content, graph, stage_of, batch=batch)


def _needed(graph: Graph | None, what: str) -> Graph:
    if graph is None:
        raise ConfigError(f"{what} needs --graph FILE, the graph that the strategy is for")
    return graph

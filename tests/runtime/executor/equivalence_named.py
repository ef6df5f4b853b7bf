"""Cases of the well-known strategies and of pipelines, and plain training of their models."""

from __future__ import annotations

from functools import cache
from typing import Any

from equivalence_cases import Case
from equivalence_check import RanksBySize
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond
from equivalence_models import small_graph
from equivalence_reference import Trace, train_alone
from equivalence_strategies import named_strategies
from made_graphs import replicated_pipeline

from harness.domain.strategy import Strategy


@cache
def strategies(model: str, n_ranks: int, batch: int) -> dict[str, Strategy]:
    """The well-known strategies of a model."""
    return named_strategies(small_graph(model), n_ranks, batch)


def case_of(model: str, strategy: Strategy, **changes: Any) -> Case:
    """A case on as many ranks as the strategy has devices."""
    fields = {"name": strategy.name, "n_ranks": strategy.n_devices, **changes}
    return Case(model=model, strategy=strategy, **fields)


def make_case(model: str, name: str, n_ranks: int = 2, batch: int = 8, **changes: Any) -> Case:
    """A case of the strategy of this name."""
    strategy = strategies(model, n_ranks, batch)[name]
    return case_of(model, strategy, name=name, n_ranks=n_ranks, **changes)


def pipeline_case(
    model: str, batch: int, devices: list[list[int]], n_microbatches: int, **changes: Any
) -> Case:
    """A case of stages on these devices; `schedule` and `recompute` are the pipeline's."""
    flow = {key: changes.pop(key) for key in ("schedule", "recompute") if key in changes}
    graph = small_graph(model)
    strategy = replicated_pipeline(graph, batch, devices, n_microbatches=n_microbatches, **flow)
    return case_of(model, strategy, **changes)


@cache
def trained_alone(model: str) -> Trace:
    """Train on one device by whole batches, as a user trains."""
    return train_alone(make_case(model, "single"))


def assert_trained(case: Case, ranks: RanksBySize) -> None:
    """Fail unless a case trains what `trained_alone` does."""
    found = ranks.train(case)
    assert first_beyond(found, trained_alone(case.model), FLOAT64_TOLERANCES["sgd"]) is None

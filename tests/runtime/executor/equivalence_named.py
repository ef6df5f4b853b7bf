"""Cases of the well-known strategies on two ranks, and plain training of their models."""

from __future__ import annotations

from functools import cache

from equivalence_cases import Case
from equivalence_models import small_graph
from equivalence_reference import Trace, train_alone
from equivalence_strategies import named_strategies

from harness.domain.strategy import Strategy


@cache
def strategies(model: str) -> dict[str, Strategy]:
    """The well-known strategies of a model on two ranks, for 8 samples."""
    return named_strategies(small_graph(model), 2, 8)


def make_case(model: str, name: str) -> Case:
    """A case of the strategy of this name."""
    return Case(name=name, model=model, n_ranks=2, strategy=strategies(model)[name])


@cache
def trained_alone(model: str) -> Trace:
    """Train on one device by whole batches, as a user trains."""
    return train_alone(make_case(model, "single"))

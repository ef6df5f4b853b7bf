"""Mixtures of experts train what one device trains, their experts on different devices."""

import pytest
from equivalence_models import small_graph
from equivalence_named import assert_trained, make_case
from msgspec.structs import replace

from harness.domain.strategy import OperatorPlan
from harness.plan.patterns import experts_of


def check(case, ranks):
    """Losses, gradients and weights of three steps, the router's too; all experts are cut."""
    plans = case.strategy.operators
    inside = experts_of(small_graph(case.model)).inside
    assert inside
    assert all(plans[name].partition == {dim: case.n_ranks} for name, dim in inside.items())
    assert_trained(case, ranks)


@pytest.mark.parametrize(
    ("model", "name", "n_ranks"),
    [
        ("mixture", "hybrid", 4),
        ("mixture_of_batch", "hybrid", 4),
        ("mixture_of_samples", "hybrid", 2),
        ("soft_mixture", "hybrid", 2),
    ],
)
def test_experts_on_devices_train_what_one_device_trains(model, name, n_ranks, ranks):
    check(make_case(model, name, n_ranks), ranks)


@pytest.mark.parametrize("model", ["mixture", "mixture_of_batch"])
def test_devices_that_pick_their_experts_tokens_train_what_one_device_trains(model, ranks):
    case = make_case(model, "hybrid")
    plans = dict(case.strategy.operators)
    for name, dim in experts_of(small_graph(model)).around.items():
        plans[name] = OperatorPlan({dim: 2}, [0, 1])
    check(replace(case, strategy=replace(case.strategy, operators=plans)), ranks)

"""What is written beside a run before it starts."""

import pytest

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.strategy import OperatorPlan, Strategy
from harness.plan.simulate.simulator import Simulator
from harness.workloads.planning.inputs import predict


def predicted(sizes, n_microbatches):
    """Of one operator on one of two devices, measured at some numbers of samples of eight."""
    graph = Graph(
        name="one",
        batch=8,
        operators=[
            Operator(name="in", kind="input", shape={"sample": 8}),
            Operator(name="a", kind="elementwise", inputs=["in"], shape={"sample": 8}),
        ],
    )
    points = [
        Measurement(
            device_kind="device", operator="a", shape={"sample": n}, forward_s=1.0 + n, backward_s=n
        )
        for n in sizes
    ]
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=10**6)
    simulator = Simulator(graph, Profile(model="one", measurements=points), cluster)
    plans = {"a": OperatorPlan({}, [0])}
    strategy = Strategy(name="s", batch=8, operators=plans, n_microbatches=n_microbatches)
    return predict(simulator, strategy, method="builder")


def test_the_fit_error_is_of_all_sizes_of_microbatch():
    assert predicted([8, 3, 2], 3).profile_fit_error is None  # three, three and two samples
    assert predicted([8, 3, 1], 3).profile_fit_error == pytest.approx(0, abs=1e-9)
    assert predicted([8, 2, 1], 3).profile_fit_error == pytest.approx(0, abs=1e-9)


def test_every_rank_has_its_contention():
    assert predicted([8], 1).contention_s == {"0": 0.0, "1": 0.0}

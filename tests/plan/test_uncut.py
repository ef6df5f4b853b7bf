"""Plans of operators that are not cut by samples as others are: merged rows, positions."""

import pytest
from made_graphs import GB, changed, layers, profile_of, request_of, unlike_cluster
from msgspec.structs import replace

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import Strategy, validate
from harness.plan.portfolio import plan as plan_with_simulator
from harness.plan.search.pipelines import PipelineSearch
from harness.plan.search.space import Space
from harness.plan.simulate.simulator import Simulator


def merged_rows():
    """Layers of which the second has a row for each of 16 steps of each sample."""
    graph, profile = layers(4, batch=32)
    shape = {"sample": 32 * 16, "feature": 8}
    points = [replace(p, shape=shape) if p.operator == "fc1" else p for p in profile.measurements]
    return changed(graph, ["fc1"], shape=shape), replace(profile, measurements=points)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.6, 0.8)])
def test_every_plan_cuts_merged_rows_between_samples(speeds):
    graph, profile = merged_rows()
    cluster = unlike_cluster(speeds)
    simulator = Simulator(graph, profile, cluster)
    op = graph.index()["fc1"]
    for batch, samples in ((32, 32), (32, 2)):
        costs = simulator.costs(samples)
        menu = Space(costs, cluster, simulator.placed).menus[op]
        blocks = [block for plan in menu for block in costs.blocks(op, plan)]
        assert all(bound % 16 == 0 for (rows, *_) in blocks for bound in rows)
        assert any(plan.partition == {"sample": 3} for plan in menu) == (samples >= 3)
        search = PipelineSearch(simulator, batch, batch // samples)
        for pipeline in search.candidates(1000):
            validate(search.strategy(pipeline), graph, cluster)
    found = plan_with_simulator(request_of(graph, profile, cluster))
    validate(found.strategy, graph, cluster)


def without_own_samples(positions, mixed):
    """A model of 8 samples where a learned position has features and no samples, and what it is
    added to has its samples second."""
    second = {"seq": 4, "sample": 8, "feature": 8}
    graph = Graph(
        name="positions",
        batch=8,
        operators=[
            Operator(name="x", kind="input", shape=second),
            positions,
            Operator(name="add", kind="add", inputs=["x", "position"], shape=second),
            Operator(
                name="fc", kind="linear", inputs=["add"], shape=second, parameter_bytes=1000,
                attrs={"in_features": 8},
            ),
            mixed,
        ],
    )  # fmt: skip
    return graph, profile_of(graph)


POSITIONS = [
    Operator(
        name="position", kind="embedding", shape={"seq": 4, "feature": 8}, parameter_bytes=128
    ),
    Operator(name="position", kind="elementwise", shape={"seq": 4, "feature": 8}),
]


@pytest.mark.parametrize("position", POSITIONS)
def test_every_plan_of_every_menu_is_valid_on_four_devices(position):
    head = Operator(name="head", kind="linear", inputs=["fc"], shape={"sample": 8, "feature": 8},
                    parameter_bytes=1000)  # fmt: skip
    request = request_of(*without_own_samples(position, head))
    simulator = Simulator(request.graph, request.profile, request.cluster)
    menus = Space(simulator.costs(8), request.cluster, simulator.placed).menus
    names = {op: request.graph.operators[op].name for op in menus}
    whole = {names[op]: menu[0] for op, menu in menus.items()}
    for op, menu in menus.items():
        for plan in menu:
            strategy = Strategy(name="s", batch=8, operators={**whole, names[op]: plan})
            validate(strategy, request.graph, request.cluster)
    found = plan_with_simulator(request)
    validate(found.strategy, request.graph, request.cluster)
    assert any(len(plan.partition) > 1 for plan in menus[4])


def test_pipelines_leave_whole_what_cannot_be_cut_by_samples():
    graph, profile = layers(4)
    graph = changed(graph, ["fc1"], attrs={"is_cut_by_samples": False})
    cluster = Cluster.uniform(1, 3, inside_bytes_per_s=1e6, memory_bytes=GB)
    search = PipelineSearch(Simulator(graph, profile, cluster), 8, 2)
    for pipeline in search.candidates(1000):
        validate(search.strategy(pipeline), graph, cluster)

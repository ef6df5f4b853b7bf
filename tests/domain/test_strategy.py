import msgspec
import pytest

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import (
    OperatorPlan,
    Stage,
    Strategy,
    check_fresh,
    copies_of,
    samples_per_device,
    validate,
)
from harness.errors import StrategyError

MIB = 2**20


def make_graph(features=6):
    return Graph(
        name="tiny",
        batch=8,
        operators=[
            Operator(name="x", kind="input", shape={"sample": 8, "feature": 4}),
            Operator(
                name="fc1", kind="linear", inputs=["x"], shape={"sample": 8, "feature": features}
            ),
            Operator(name="fc2", kind="linear", inputs=["fc1"], shape={"sample": 8, "feature": 2}),
        ],
    )


def make_cluster(**changes):
    options = {"inside_bytes_per_s": 1e9, "memory_bytes": MIB, **changes}
    return Cluster.uniform(2, 2, **options)


def make_strategy(**changes):
    values = {
        "name": "hybrid",
        "batch": 8,
        "n_microbatches": 2,
        "schedule": "1f1b",
        "stages": [Stage(), Stage(recompute=True)],
        "operators": {
            "fc1": OperatorPlan({"sample": [2, 1]}, [0, 1]),
            "fc2": OperatorPlan({"feature": 2}, [2, 3], 1),
        },
    }
    return Strategy(**{**values, **changes})


def with_plan(name, plan):
    return make_strategy(operators={**make_strategy().operators, name: plan})


def test_a_norm_that_the_graph_does_not_have_is_named():
    graph = make_graph()
    calls = msgspec.structs.replace(graph.operators[2], attrs={"shares_norm_with": "fc9"})
    graph = msgspec.structs.replace(graph, operators=[*graph.operators[:2], calls])
    with pytest.raises(StrategyError, match="'fc2' shares_norm_with 'fc9', not in 'tiny'"):
        validate(make_strategy(), graph, make_cluster())


def test_an_input_writes_no_buffer():
    graph = make_graph()
    validate(make_strategy(), graph, make_cluster())
    given = msgspec.structs.replace(graph.operators[0], attrs={"writes_buffers": ["b"]})
    graph = msgspec.structs.replace(graph, operators=[given, *graph.operators[1:]])
    validate(make_strategy(), graph, make_cluster())


def test_every_size_of_microbatch_must_be_cut_into_parts_with_samples():
    # 9 samples in 2 microbatches: shares 9 : 2 : 9 cut 4 into 1, 1, 2 but 5 into 2, 0, 3.
    plan = OperatorPlan({"sample": [9, 2, 9]}, [0, 1, 0])
    operators = {**make_strategy().operators, "fc1": plan}
    strategy = make_strategy(batch=9, operators=operators)
    with pytest.raises(StrategyError, match=r"microbatch 5.*leaves an empty part"):
        validate(strategy, make_graph(), make_cluster())


def test_samples_follow_the_shares():
    assert samples_per_device(make_strategy(), "fc1") == {0: 4, 1: 4}
    assert samples_per_device(make_strategy(n_microbatches=1), "fc1") == {0: 5, 1: 3}
    assert samples_per_device(make_strategy(), "fc2") == {2: 8, 3: 8}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            with_plan("fc1", OperatorPlan({"sample": 2}, [0, 9])),
            "device 9, the cluster has devices 0 to 3",
        ),
        (with_plan("fc1", OperatorPlan({"sample": 2}, [0])), "2 blocks and 1 devices"),
        (with_plan("fc1", OperatorPlan({"height": 2}, [0, 1])), "cannot be cut along 'height'"),
        (with_plan("fc1", OperatorPlan({"sample": 5}, [0] * 5)), "leaves an empty part"),
        (with_plan("conv9", OperatorPlan({}, [0])), "'conv9'.*another model"),
        (with_plan("x", OperatorPlan({}, [9], 7)), "places 'x', which is an input of graph 'tiny'"),
        (make_strategy(operators={"fc1": OperatorPlan({}, [0])}), "does not place operator 'fc2'"),
        (make_strategy(n_microbatches=9), "8 into 9 microbatches"),
        (make_strategy(stages=[Stage()]), "in stage 1, the strategy has stages 0 to 0"),
        (make_strategy(stages=[Stage()] * 3), "stage 2 of 3 has no operator"),
        (make_strategy(stages=[]), "no stage"),
        (with_plan("fc1", OperatorPlan({}, [2], 0)), "stages 0 and 1 share device 2"),
        (
            make_strategy(
                operators={"fc1": OperatorPlan({}, [0], 1), "fc2": OperatorPlan({}, [1], 0)}
            ),
            "stages must follow the flow",
        ),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(strategy, message):
    with pytest.raises(StrategyError, match=message):
        validate(strategy, make_graph(), make_cluster())


def copied(plan):
    """A strategy whose activation after fc1 has a plan of its own."""
    graph = make_graph()
    relu = Operator(
        name="relu", kind="elementwise", inputs=["fc1"], shape={"sample": 8, "feature": 6}
    )
    graph = msgspec.structs.replace(graph, operators=[*graph.operators[:2], relu])
    operators = {"fc1": OperatorPlan({}, [0]), "relu": plan}
    return Strategy(name="copies", batch=8, operators=operators), graph


def test_copies_are_those_of_one_block_and_are_fed_all_of_it():
    plan = OperatorPlan({"sample": 2, "replica": 2}, [0, 1, 3, 2])
    strategy, graph = copied(plan)
    validate(strategy, graph, make_cluster())
    assert [copies_of(plan, k) for k in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert copies_of(OperatorPlan({"sample": 2}, [0, 1]), 1) == ()
    assert samples_per_device(strategy, "relu") == {0: 4, 2: 4}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (OperatorPlan({"replica": 2}, [1, 1]), r"2 copies of a block on devices \[1, 1\]"),
        (OperatorPlan({"replica": 3}, [0, 1]), "3 blocks and 2 devices"),
        (OperatorPlan({"replica": [2, 1]}, [0, 1]), r"\[2, 1\] copies of a block are not"),
        (OperatorPlan({"replica": 0}, []), "0 copies of a block are not possible"),
    ],
)
def test_copies_that_do_not_fit_are_refused(plan, message):
    strategy, graph = copied(plan)
    with pytest.raises(StrategyError, match=message):
        validate(strategy, graph, make_cluster())


def test_fresh_strategy_is_accepted_and_one_without_hashes_too():
    made_for = fingerprint(make_graph(), make_cluster())
    check_fresh(make_strategy(made_for=made_for), make_graph(), make_cluster())
    check_fresh(
        make_strategy(made_for=made_for), make_graph(), make_cluster(inside_bytes_per_s=2e9)
    )
    check_fresh(make_strategy(), make_graph(features=9), make_cluster())


@pytest.mark.parametrize(
    ("graph", "cluster", "message"),
    [
        (make_graph(features=7), make_cluster(), "stale: operator 'fc1' changed"),
        (
            msgspec.structs.replace(make_graph(), name="other"),
            make_cluster(),
            "the model was 'tiny' and is 'other'",
        ),
        (msgspec.structs.replace(make_graph(), batch=4), make_cluster(), "batch or name changed"),
        (make_graph(), make_cluster(kind="T4"), "device 'node0:0' changed from 'device,.*to 'T4,"),
        (
            make_graph(),
            Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=MIB),
            r"device 'node1:0' is gone \(and 1 more\)",
        ),
    ],
)
def test_stale_strategy_is_refused_with_the_difference_named(graph, cluster, message):
    strategy = make_strategy(made_for=fingerprint(make_graph(), make_cluster()))
    with pytest.raises(StrategyError, match=message):
        check_fresh(strategy, graph, cluster)


def test_repeating_device_sets_are_interleaved_stages():
    plans = {"fc1": OperatorPlan({}, [0], 0), "fc2": OperatorPlan({}, [0], 1)}
    strategy = make_strategy(operators=plans, schedule="interleaved")
    validate(strategy, make_graph(), make_cluster())
    assert strategy.n_ranks() == 1

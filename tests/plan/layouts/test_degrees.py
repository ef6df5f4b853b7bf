import pytest

from harness.domain.cluster import Cluster
from harness.domain.strategy import validate
from harness.errors import StrategyError
from harness.plan.importing.times import PlannedLayer, chain_graph
from harness.plan.layouts.degrees import ParallelLayout, layout_strategy, parse_layout

GRAPH = chain_graph("chain", [PlannedLayer(f"l{k}", 8, 8) for k in range(4)], 8, 4)
EIGHT = Cluster.uniform(2, 4, inside_bytes_per_s=1.0, memory_bytes=1)


def test_neighbours_share_a_layer_and_stages_are_farthest_apart():
    found = layout_strategy(parse_layout("tp=2,dp=2,pp=2"), GRAPH, EIGHT, 8, n_microbatches=2)
    validate(found, GRAPH, EIGHT)
    assert [plan.devices for plan in found.operators.values()] == 2 * [[0, 1, 2, 3]] + 2 * [
        [4, 5, 6, 7]
    ]
    assert {str(plan.partition) for plan in found.operators.values()} == {
        "{'sample': 2, 'heads': 2}"
    }


def test_layout_names_cuts_shares_and_devices():
    layout = parse_layout("dp=2,pp=2,cuts=1,shares=3-1,devices=0-4-1-5")
    found = layout_strategy(layout, GRAPH, EIGHT, 8)
    validate(found, GRAPH, EIGHT)
    assert [plan.stage for plan in found.operators.values()] == [0, 1, 1, 1]
    assert found.operators["l0"].partition == {"sample": [3, 1]}
    assert found.operators["l1"].devices == [1, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "write it like"),
        ("tp=0", "no degree"),
        ("tp=2,tp=2", "write it like"),
        ("ep=2", "use tp, dp, pp"),
        ("cuts=a", "no list"),
        ("cuts=", "no list"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(StrategyError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelLayout(dp=16), "needs 16 devices, the cluster has 8"),
        (ParallelLayout(dp=8), "less than a sample each"),
        (ParallelLayout(pp=2, cuts=(4,)), "cannot be cut at 4"),
        (ParallelLayout(pp=2, cuts=(1, 2)), "cannot be cut at 1-2"),
        (ParallelLayout(dp=2, shares=(1,)), "2 replicas and 1 shares"),
        (ParallelLayout(dp=2, devices=(1, 1)), "needs 2 distinct devices"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(layout, message):
    with pytest.raises(StrategyError, match=message):
        layout_strategy(layout, GRAPH, EIGHT, 4, n_microbatches=1)

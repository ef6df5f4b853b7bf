"""What bytes take from computing at both of their ends."""

import pytest
from simulated import (
    chain,
    cluster_of,
    op,
    profile_of,
    simulate,
    talking,
    timeline,
)

from harness.domain.graph import Graph
from harness.domain.strategy import OperatorPlan
from harness.errors import PlanError
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import contention_seconds


def test_transfers_take_computing_time_from_both_ends():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4), op("s", ["x"], 1)]
    operators += [op("b", ["a"], 1), op("r", ["x"], 1)]
    graph = Graph(name="host", batch=8, operators=operators)
    profile = profile_of(graph, dict.fromkeys("asbr", (4.0, 0.0)))
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("s", 0), ("b", 1), ("r", 1))}
    cluster = talking(cluster_of(), 0.5 / 32, 1.0 / 32)
    simulation = simulate(graph, profile, cluster, plans)
    found = {e[0]: e[1:] for e in timeline(simulation) if e[2] > e[1]}
    assert contention_seconds(simulation) == [0.5, 0]
    # 32 B begin at 4, when device 0 goes on with s: that takes 0.5 s longer. Device 1 waits for
    # them, so that its second of work is done when they arrive.
    assert found == {
        "a": (0, 4),
        "s": (4, 8.5),
        "a node0:0 -> node0:1": (4, 6),
        "b": (6, 10),
        "r": (10, 14),
    }


def test_what_arrives_in_parts_is_put_together():
    graph, profile = chain()
    options = SimulatorOptions(stream_s_per_byte=1 / 32)
    gathered = {"a": OperatorPlan({"sample": 2}, [0, 1]), "b": OperatorPlan({}, [0])}
    free = simulate(graph, profile, cluster_of(), gathered)
    found = simulate(graph, profile, cluster_of(), gathered, options=options)
    # b reads and writes the 32 B of a, and device 1 gets all of its part's gradient; 80 B of
    # gradients of a, on both, are copied into a bucket.
    assert found.step_s - free.step_s == 2 * 32 / 32 + 2 * 80 / 32
    # Device 1 uses its half as it arrives; its gradient is added to the other half's on device 0.
    spread = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({"sample": 2}, [0, 1])}
    found = simulate(graph, profile, cluster_of(), spread, options=options)
    seconds = [end - start for name, start, end in timeline(found) if name == "a"]
    assert seconds == [1, 2 + 3 * 16 / 32]


def test_seconds_of_a_byte_of_memory_must_be_possible():
    with pytest.raises(PlanError, match="a byte of memory takes -1 s"):
        SimulatorOptions(stream_s_per_byte=-1)

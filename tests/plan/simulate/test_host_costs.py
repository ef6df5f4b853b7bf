"""What bytes take from computing at both of their ends."""

import random

import numpy as np
import pytest
from simulated import (
    chain,
    cluster_of,
    op,
    profile_of,
    random_case,
    random_plan,
    simulate,
    talking,
    timeline,
    two_linears,
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


def test_a_short_computation_pays_for_its_part_of_a_transfer():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4), op("s", ["x"], 1)]
    operators += [op("b", ["a"], 1)]
    graph = Graph(name="host", batch=8, operators=operators)
    profile = profile_of(graph, {"a": (4.0, 0.0), "s": (0.75, 0.0), "b": (4.0, 0.0)})
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("s", 0), ("b", 1))}
    cluster = talking(cluster_of(), 0.5 / 32, 0.5 / 32)
    found = {e[0]: e[1:] for e in timeline(simulate(graph, profile, cluster, plans)) if e[2] > e[1]}
    # The transfer takes 2 s and a quarter of the processor all the while.
    assert found["a node0:0 -> node0:1"] == (4, 6)
    assert found["s"] == (4, 5)


def test_a_device_that_begins_before_its_transfer_is_worked_off_takes_the_rest_longer():
    graph, profile, cluster, plans = two_linears(2)
    free = simulate(graph, profile, cluster, plans)
    # Two transfers of 32 B occupy each device for 8 s from 4, and only 2 s of it pass idly; twice.
    found = simulate(graph, profile, talking(cluster, 0.125, 0.125), plans)
    assert found.step_s == free.step_s + 12
    assert contention_seconds(free) == [0, 0]
    assert contention_seconds(found) == [12, 12]


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


def test_no_host_cost_in_order_of_time_is_the_same_as_none():
    rng = random.Random(3)
    for _ in range(20):
        graph, profile, cluster = random_case(rng)
        plans = {o.name: random_plan(rng, cluster.n_devices) for o in graph.operators[1:]}
        free = simulate(graph, profile, cluster, plans, n_microbatches=2)
        # A smaller number than any time's last digit puts the loop in order of time.
        tiny = talking(cluster, *[1e-30] * cluster.n_devices)
        found = simulate(graph, profile, tiny, plans, n_microbatches=2)
        np.testing.assert_allclose(found.outcome.finish, free.outcome.finish, rtol=1e-14)


def test_seconds_of_a_byte_of_memory_must_be_possible():
    with pytest.raises(PlanError, match="a byte of memory takes -1 s"):
        SimulatorOptions(stream_s_per_byte=-1)

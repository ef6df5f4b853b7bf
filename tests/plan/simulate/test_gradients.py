"""Gradients: buckets and their overlap, microbatches added up, weight passes."""

import pytest
from simulated import chain, cluster_of, op, profile_of, simulate, timeline

from harness.domain.graph import Graph
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import device_seconds
from harness.plan.simulate.simulator import Simulator, Trial


def test_the_first_bucket_of_a_group_is_small_as_ddps():
    mib = 2**20
    sizes = {"a": 10 * mib, "b": 20 * mib, "c": mib}
    operators = [op("x", [], 4, kind="input")]
    for name, before in (("a", "x"), ("b", "a"), ("c", "b")):
        operators.append(op(name, [before], 4, sizes[name]))
    graph = Graph(name="g", batch=8, operators=operators)
    profile = profile_of(graph, dict.fromkeys(sizes, (1.0, 1.0)))
    simulator = Simulator(graph, profile, cluster_of(memory=10**9))
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in sizes}
    trial = Trial.from_strategy(simulator, Strategy(name="s", batch=8, operators=plans))
    assert trial.tables.buckets().n_bytes.tolist() == [mib, 30 * mib]


def test_data_parallel_overlaps_buckets_with_the_backward_pass():
    graph, profile = chain()
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b")}
    found = simulate(graph, profile, cluster_of(), plans, options=SimulatorOptions(bucket_bytes=1))
    # Half the samples halve the times. Ring over two: 2 * 1 steps of half the bytes at 16 B/s.
    assert timeline(found)[-1] == ("all-reduce a", 6.0, 11.0)
    assert ("all-reduce b", 3.5, 6.0) in timeline(found)
    assert found.step_s == 11.0


def test_without_overlap_gradients_wait_for_the_whole_backward_pass():
    graph, profile = chain()
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b")}
    found = simulate(graph, profile, cluster_of(), plans, options=SimulatorOptions(overlap=False))
    assert timeline(found)[-1] == ("all-reduce b to a", 4.5, 12.0)


def test_gradients_of_microbatches_are_added_up_and_shared_ones_copied():
    graph, profile = chain()
    options = SimulatorOptions(stream_s_per_byte=0.01)

    def added_s(plan, n_microbatches):
        plans = dict.fromkeys(("a", "b"), plan)
        found, bare = (
            simulate(
                graph, profile, cluster_of(), plans, n_microbatches=n_microbatches, options=given
            )
            for given in (options, SimulatorOptions())
        )
        return device_seconds(found, 0)["backward"] - device_seconds(bare, 0)["backward"]

    # 120 bytes of weights: the first microbatch's gradient stays, the second's is added to it.
    assert added_s(OperatorPlan({}, [0]), 1) == 0
    assert added_s(OperatorPlan({}, [0]), 2) == pytest.approx(3 * 120 * 0.01)
    assert added_s(OperatorPlan({"sample": 2}, [0, 1]), 1) == pytest.approx(2 * 120 * 0.01)


def zero_bubble(cuts, devices, names=("b", "n")):
    """a, then a product b and a batch norm n on another stage, in two microbatches."""
    kinds = {"b": "linear", "n": "batch_norm"}
    operators = [
        op("x", [], 4, kind="input"),
        op("a", ["x"], 4, 80),
        *(
            op(name, [before], 4, 40, kind=kinds[name])
            for before, name in zip(("a", *names), names, strict=False)
        ),
    ]
    graph = Graph(name="g", batch=8, operators=operators)
    profile = profile_of(graph, {"a": (1.0, 3.0), "b": (1.0, 3.0), "n": (1.0, 3.0)})
    last = OperatorPlan(cuts, devices, 1)
    return simulate(
        graph,
        profile,
        cluster_of(3, bandwidth=1e12),
        {"a": OperatorPlan({}, [0]), "b": last, "n": last},
        n_microbatches=2,
        schedule="zero_bubble",
        stages=[Stage(), Stage()],
        options=SimulatorOptions(bucket_bytes=1),
    )


def test_zero_bubble_defers_weights_of_products_behind_the_first_stage():
    forward, backward, weight, _ = zero_bubble({}, [1]).outcome.lowered.work.seconds.tolist()
    assert forward == [0.5] * 3
    assert backward == [1.5, 0.5, 1.5]  # b's to inputs takes as long as its forward
    assert weight == [0.0, 1.0, 0.0]


def test_zero_bubble_sums_each_gradient_after_the_pass_that_has_it():
    found = timeline(zero_bubble({"sample": 2}, [1, 2]))
    start = {name: start for name, start, _ in found}
    end = {name: end for name, _, end in found}
    assert start["all-reduce n"] == end["n #1"] < start["weights of b #1"]
    assert start["all-reduce b"] == end["weights of b #1"]


def test_buckets_of_the_same_devices_start_in_one_order():
    found = timeline(zero_bubble({"sample": 2}, [1, 2], names=("n", "b")))
    start = {name: start for name, start, _ in found}
    end = {name: end for name, _, end in found}
    # n's gradients are there before, but b's bucket comes first.
    assert end["n #1"] < start["weights of b #1"]
    assert end["weights of b #1"] == start["all-reduce b"] < start["all-reduce n"]

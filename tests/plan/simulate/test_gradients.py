"""Gradients: buckets and their overlap, microbatches added up or joined."""

import msgspec
import numpy as np
import pytest
from simulated import chain, cluster_of, op, profile_of, simulate, timeline, two_linears

from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.simulate.costs import is_product
from harness.plan.simulate.device_seconds import operator_seconds
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


def simulated_joined(
    joined_weight_bytes,
    n_microbatches=2,
    *,
    n_stages=1,
    weight_bytes=80,
    first=None,
    to_inputs_s=None,
    schedule="gpipe",
):
    """Two products with weights, fed and giving 32 bytes in a microbatch of 4 samples."""
    graph = two_linears(1)[0]
    operators = [
        msgspec.structs.replace(op, parameter_bytes=weight_bytes) if op.name in ("a", "b") else op
        for op in graph.operators
    ]
    graph = Graph(name="joined", batch=8, operators=operators)
    points = [
        Measurement(
            device_kind="device", operator=op.profile_key, shape={"sample": n, "feature": 4},
            forward_s=n / 4, backward_s={4: 2.0, 8: 2.75}[n],
            input_backward_s=to_inputs_s and to_inputs_s[n],
        )
        for op in {op.profile_key: op for op in operators[1:]}.values() for n in (4, 8)
    ]  # fmt: skip
    profile = Profile(model=graph.name, graph_hash=graph.content_hash(), measurements=points)
    last = n_stages - 1
    plans = {
        "a": first or OperatorPlan({}, [0], 0),
        "b": OperatorPlan({}, [last], last),
        "c": OperatorPlan({}, [last], last),
    }
    return simulate(
        graph,
        profile,
        cluster_of(2, bandwidth=1e12),
        plans,
        n_microbatches=n_microbatches,
        schedule=schedule,
        stages=[Stage()] * n_stages,
        options=SimulatorOptions(stream_s_per_byte=0.01, joined_weight_bytes=joined_weight_bytes),
    )


def test_gradients_of_joined_microbatches_are_computed_once_and_not_added_up():
    apart, joined = simulated_joined(81), simulated_joined(80)
    # Half of the 2 s of each backward was for the weights, both at once take 0.75 s.
    added_s, copied_s = 0.01 * 3 * 80, 0.01 * 2 * 64
    saved_s = added_s + 2 * 1.0 - 0.75 - copied_s
    assert apart.step_s - joined.step_s == pytest.approx(2 * saved_s)
    assert joined.memory_bytes["node0:0"] - apart.memory_bytes["node0:0"] == 2 * 64
    assert simulated_joined(80, 1).step_s == simulated_joined(81, 1).step_s


def test_backward_to_inputs_takes_what_it_was_measured_to():
    fitted, measured = simulated_joined(80), simulated_joined(80, to_inputs_s={4: 1.5, 8: 2.5})
    # Each microbatch 0.5 s more, and what is left for the weights 0.5 s less: of a and b.
    assert measured.step_s - fitted.step_s == pytest.approx(2 * (2 * 0.5 - 0.5))
    apart = simulated_joined(81, to_inputs_s={4: 1.5, 8: 2.5})
    assert apart.step_s == simulated_joined(81).step_s


def test_an_operators_seconds_hold_its_part_of_joined_gradients():
    apart, joined = (operator_seconds(simulated_joined(n).simulator, 8, 2) for n in (81, 80))
    saved_s = 0.01 * 3 * 80 + 2 * 1.0 - 0.75 - 0.01 * 2 * 64
    assert apart.shape == (2, 3)
    assert (apart - joined).tolist() == [pytest.approx([saved_s / 2, saved_s / 2, 0.0])] * 2
    # 1 s forward and 2 s backward of four samples, and adding up.
    assert apart[0].tolist() == pytest.approx([3 + 0.01 * 3 * 80 / 2] * 2 + [3])


def test_microbatches_are_joined_on_all_devices_of_an_operator_or_on_none():
    # Of its 64 bytes the devices keep 48 and 16; b keeps 64 on the first.
    def joined_bytes(weight_bytes):
        first = OperatorPlan({"sample": [3, 1]}, [0, 1])
        apart, joined = (
            simulated_joined(least, weight_bytes=weight_bytes, first=first).memory_bytes
            for least in (np.inf, 1)
        )
        return [joined[device] - apart[device] for device in ("node0:0", "node0:1")]

    assert joined_bytes(47) == [0, 0]
    assert joined_bytes(48) == [48, 16]
    assert joined_bytes(64) == [48 + 64, 16]


def test_a_product_without_samples_may_be_joined():
    shape = {"seq": 4, "feature": 4}
    query = Operator(name="q", kind="linear", inputs=[], shape=shape, parameter_bytes=800,
                     activation_bytes=16)  # fmt: skip
    graph = Graph(name="query", batch=8, operators=[op("x", [], 4, kind="input"), query])
    steps = [
        simulate(
            graph,
            profile_of(graph, {"q": (1.0, 3.0)}),
            cluster_of(1),
            {"q": OperatorPlan({}, [0])},
            n_microbatches=2,
            options=SimulatorOptions(joined_weight_bytes=least),
        ).step_s
        for least in (800, 801)
    ]
    assert steps == [2 * (1.0 + 3.0)] * 2


def test_joined_gradients_come_after_what_the_stage_before_waits_for():
    found = timeline(simulated_joined(80, n_stages=2))
    (weights,) = [event for event in found if event[0].startswith("weights of")]
    assert weights[0].startswith("weights of b")
    assert weights[2] - weights[1] == pytest.approx(0.75 + 0.01 * 2 * 64)
    # Meanwhile the first stage has its last backward, which began as soon as b's had ended.
    backward = max((event for event in found if event[0].startswith("a ")), key=lambda e: e[1])
    assert backward[1] == pytest.approx(weights[1])


def test_zero_bubble_joins_gradients_in_the_last_weight_pass():
    found = timeline(simulated_joined(80, n_stages=2, schedule="zero_bubble"))
    (weights,) = [event for event in found if event[0].startswith("weights of")]
    assert weights[0] == "weights of b #1"
    joined_s = 0.75 + 0.01 * 2 * 64
    assert weights[2] - weights[1] == pytest.approx(joined_s)
    # Nobody waits for the first stage's gradients of inputs: its last backward has it all.
    backward = [end - start for name, start, end in found if name in ("a #0", "a #1")][2:]
    assert backward == pytest.approx([1.0, 1.0 + joined_s])


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
    forward, backward, weight, _ = zero_bubble({}, [1]).outcome.seconds.tolist()
    assert forward == [0.5] * 3
    assert backward == [1.5, 0.5, 1.5]  # b's to inputs takes as long as its forward
    assert weight == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "n_bytes", "attrs", "is_one"),
    [
        ("linear", 4, {}, True),
        ("conv2d", 4, {}, True),
        ("conv2d", 4, {"padding_mode": "reflect"}, False),
        ("linear", 0, {}, False),
        ("batch_norm", 4, {}, False),
        ("embedding", 4, {}, False),
        ("lstm", 4, {}, False),
    ],
)
def test_products_are_what_the_executor_may_defer(kind, n_bytes, attrs, is_one):
    assert is_product(op("o", [], 4, n_bytes, kind=kind, **attrs)) == is_one


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


def test_gradients_in_place_are_added_up_within_their_backward():
    graph, profile, cluster, plans = two_linears(1)
    times = [
        simulate(graph, profile, cluster, plans, n_microbatches=2, options=options).step_s
        for options in (
            SimulatorOptions(),
            SimulatorOptions(stream_s_per_byte=0.01, in_place_bytes=1),
            SimulatorOptions(stream_s_per_byte=0.01),
        )
    ]
    assert times[0] == times[1] < times[2]

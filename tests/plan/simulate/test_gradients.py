"""Gradients and partial sums: buckets and their overlap, microbatches added up, weight passes."""

from dataclasses import replace

import pytest
from msgspec import structs
from simulated import (
    BY_SAMPLES,
    ZERO,
    chain,
    cluster_of,
    model,
    op,
    row,
    simulate,
    simulate_chain,
    timeline,
    two_linears,
)

from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import device_seconds
from harness.plan.simulate.simulator import Simulator, Trial


def test_the_first_bucket_of_a_group_is_small_as_ddps():
    mib = 2**20
    sizes = {"a": 10 * mib, "b": 20 * mib, "c": mib}
    simulator = Simulator(*row(sizes), cluster_of(memory=10**9))
    strategy = Strategy(name="s", batch=8, operators=dict.fromkeys(sizes, BY_SAMPLES))
    trial = Trial(simulator, strategy)
    assert trial.tables.buckets().n_bytes.tolist() == [mib, 30 * mib]


def test_data_parallel_overlaps_buckets_with_the_backward_pass():
    found = simulate_chain(BY_SAMPLES, BY_SAMPLES, options=SimulatorOptions(bucket_bytes=1))
    # Half the samples halve the times. Ring over two: 2 * 1 steps of half the bytes at 16 B/s.
    assert timeline(found)[-1] == ("all-reduce a", 6.0, 11.0)
    assert ("all-reduce b", 3.5, 6.0) in timeline(found)
    assert found.step_s == 11.0


def test_rounded_gradients_send_half_and_need_their_copies():
    whole, rounded = (
        simulate_chain(
            BY_SAMPLES, BY_SAMPLES,
            options=SimulatorOptions(bucket_bytes=1, reduce_bytes_per_gradient_byte=share),
        )
        for share in (1.0, 0.5)
    )  # fmt: skip
    # Sums of 2.5 s and 5 s take half; the first begins as before.
    assert timeline(whole)[-1] == ("all-reduce a", 6.0, 11.0)
    assert timeline(rounded)[-1] == ("all-reduce a", 4.75, 7.25)
    copies = sum(op.weight_bytes for op in chain()[0].operators) / 2
    more = [
        rounded.memory_bytes[device] - n_bytes for device, n_bytes in whole.memory_bytes.items()
    ]
    assert more == [copies, copies]


def test_a_gradient_is_beside_its_bucket_until_it_is_copied():
    def memory_bytes(n_devices):
        graph, profile = model([op("a", ["x"], 4, 10_000, kept_bytes=0)])
        plan = OperatorPlan(partition={"sample": n_devices}, devices=[*range(n_devices)])
        return simulate(graph, profile, cluster_of(), {"a": plan}).memory_bytes["node0:0"]

    # Half of the samples have half of the gradient of the output.
    assert memory_bytes(2) - memory_bytes(1) == 10_000 - 16


def test_averaged_replicas_sum_and_compute_a_part_of_their_weights():
    whole = SimulatorOptions(bucket_bytes=1, n_optimizer_states=1, stream_s_per_byte=0.01)
    averaged = whole.averaging(4)
    found, bare = (
        simulate_chain(BY_SAMPLES, BY_SAMPLES, options=options)
        for options in (averaged, replace(averaged, stream_s_per_byte=0.0))
    )
    # A fourth of 2.5 s and of 5 s, after the first forward of 0.5 s.
    assert [one for one in timeline(bare) if "average" in one[0]] == [
        ("average b", 0.5, 1.125),
        ("average a", 1.125, 2.375),
    ]
    more = device_seconds(found, 0)["backward"] - device_seconds(bare, 0)["backward"]
    assert more == pytest.approx(16 / 4 * 120 * 0.01)
    assert averaged.n_optimizer_states == 2
    assert averaged.n_states == 2 + 2 / 4
    assert (
        replace(averaged, reduce_bytes_per_gradient_byte=0.5).sent_bytes_per_gradient_byte == 1 / 8
    )


def test_without_overlap_gradients_wait_for_the_whole_backward_pass():
    found = simulate_chain(BY_SAMPLES, BY_SAMPLES, options=SimulatorOptions(overlap=False))
    assert timeline(found)[-1] == ("all-reduce b to a", 4.5, 12.0)


def test_gradients_of_microbatches_are_added_up_and_shared_ones_copied():
    def added_s(plan, n_microbatches):
        found, bare = (
            device_seconds(simulate_chain(plan, plan, n_microbatches=n_microbatches, options=o), 0)
            for o in (SimulatorOptions(stream_s_per_byte=0.01), SimulatorOptions())
        )
        return found["backward"] - bare["backward"]

    # 120 bytes of weights: the first microbatch's gradient stays, the second's is added to it.
    assert added_s(ZERO, 1) == 0
    assert added_s(ZERO, 2) == pytest.approx(3 * 120 * 0.01)
    assert added_s(BY_SAMPLES, 1) == pytest.approx(2 * 120 * 0.01)


def zero_bubble(cuts, devices, names=("b", "n")):
    """a, then a product b and a batch norm n on another stage, in two microbatches."""
    kinds = {"b": "linear", "n": "batch_norm"}
    behind = zip(("a", *names), names, strict=False)
    operators = [op(name, [before], 4, 40, kind=kinds[name]) for before, name in behind]
    graph, profile = model([op("a", ["x"], 4, 80), *operators], (1.0, 3.0))
    last = OperatorPlan(cuts, devices, 1)
    return simulate(
        graph,
        profile,
        cluster_of(3, bandwidth=1e12),
        {"a": ZERO, "b": last, "n": last},
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


def test_contraction_reads_what_features_left_and_sums_among_two_pairwise():
    found = simulate(*two_linears(2))
    moved = [e for e in timeline(found) if e[1] < 10 and "->" in e[0]]
    # Nothing between a and b; then both send their 32 B of partial sums to the other.
    assert moved == [("b node0:0 -> node0:1", 4, 6), ("b node0:1 -> node0:0", 4, 6)]
    assert [e for e in timeline(found) if "all-reduce" in e[0]] == []
    # Weights, a state and all outputs: c's are freed before the first gradient.
    assert found.memory_bytes["node0:0"] == 2 * (40 + 20) + 16 + 32 + 16 + 32


def test_partial_sums_of_more_than_two_devices_are_all_reduced():
    found = simulate(*two_linears(4))
    # A ring of 4: 6 steps of 8 B at 16 B/s; forward before c and backward before b.
    assert [e for e in timeline(found) if "sum" in e[0]] == [
        ("sum of b", 2.0, 5.0),
        ("gradient of sum of b", 8.0, 11.0),
    ]
    assert not [e for e in timeline(found) if "->" in e[0]]
    assert found.step_s == 15.0


def test_what_travels_as_bf16_is_half_of_fp32():
    graph, profile, cluster, plans = two_linears(4)
    half = SimulatorOptions(wire_bytes_per_fp32_byte=0.5, stream_s_per_byte=0.01)
    whole = SimulatorOptions(stream_s_per_byte=0.01)
    for reader in (plans["c"], OperatorPlan({"sample": 4}, [0, 1, 2, 3])):
        given = graph, profile, cluster, plans | {"c": reader}
        found, all_of_it = (simulate(*given, options=o).outcome.lowered for o in (half, whole))
        assert [one.n_bytes for one in found.edges.sums] == [(16, 16) for _ in all_of_it.edges.sums]
        assert [one.n_bytes for one in all_of_it.edges.sums] == [(32, 32) for _ in found.edges.sums]
        assert (found.edges.n_bytes * 2).tolist() == all_of_it.edges.n_bytes.tolist()


def test_partial_sums_are_sent_where_others_want_them_or_not_all_of_them():
    graph, profile, cluster, plans = two_linears(4)
    for reader in (
        OperatorPlan({"sample": 4}, [0, 1, 2, 3]),
        OperatorPlan({}, [0]),
        OperatorPlan({"feature": 3}, [0, 1, 2]),
    ):
        found = simulate(graph, profile, cluster, plans | {"c": reader})
        names = [e[0] for e in timeline(found)]
        assert not [name for name in names if "sum" in name]
        assert [name for name in names if "b node0:1 -> node0:0" in name]


@pytest.mark.parametrize("devices", [[0, 1], [1, 0]])
def test_what_no_sample_affects_is_computed_by_each_for_readers_of_its_samples(devices):
    table = op("p", [], 4, 80, kind="embedding", reads_samples=False)
    table = structs.replace(table, shape={"feature": 4}, activation_bytes=4)
    ops = [op("a", ["x"], 4), table, op("b", ["a", "p"], 4, kind="add")]
    plans = {"a": BY_SAMPLES, "p": OperatorPlan({"sample": 2}, devices), "b": BY_SAMPLES}
    found = [e[0] for e in timeline(simulate(*model(ops), cluster_of(), plans))]
    assert found.count("p") == 4
    assert found.count("all-reduce p") == 1
    sent = {"p node0:0 -> node0:1", "p node0:1 -> node0:0"}
    gradients = {f"gradient of {name}" for name in sent}
    assert {name for name in found if "->" in name} == (sent | gradients if devices[0] else set())


def with_copies(n_devices):
    """A contraction, an elementwise that all devices compute, and a reader cut by features."""
    graph, _, cluster, plans = two_linears(n_devices)
    ops = [*graph.operators[1:3], op("r", ["b"], 4, kind="elementwise"), op("c", ["r"], 4, 0)]
    seconds = {"a": (4.0, 8.0), "b": (4.0, 8.0), "r": (1.0, 2.0), "c": (4.0, 8.0)}
    devices = list(range(n_devices))
    plans = plans | {"r": OperatorPlan({"replica": n_devices}, devices)}
    return *model(ops, seconds), cluster, plans


def test_copies_have_what_they_read_and_give_without_a_word():
    found = timeline(simulate(*with_copies(2)))
    # Forward the partial sums of b meet before r; backward those of r's gradient before r.
    moved = {e for e in found if "->" in e[0]}
    assert moved == {
        ("b node0:0 -> node0:1", 4, 6),
        ("b node0:1 -> node0:0", 4, 6),
        ("gradient of r node0:0 -> node0:1", 13, 15),
        ("gradient of r node0:1 -> node0:0", 13, 15),
    }
    # Every copy is all of r.
    assert [e for e in found if e[0] == "r"] == [("r", 6, 7), ("r", 6, 7)] + [("r", 15, 17)] * 2


def test_copies_on_more_than_two_devices_are_all_reduced_once_each_way():
    found = timeline(simulate(*with_copies(4)))
    assert not [e for e in found if "->" in e[0]]
    assert [e[0] for e in found if "sum" in e[0]] == ["sum of b", "gradient of sum of r"]


def test_a_copy_elsewhere_reads_and_one_copy_alone_gives_its_gradient_back():
    graph, profile, cluster, plans = with_copies(2)
    plans |= {
        "b": OperatorPlan({}, [0]),
        "r": OperatorPlan({"replica": 2}, [0, 1]),
        "c": OperatorPlan({}, [1]),
    }
    moved = [e[0] for e in timeline(simulate(graph, profile, cluster, plans)) if "->" in e[0]]
    # c's gradient goes to both copies of r, but b has its own device's already.
    assert moved == [
        "a node0:1 -> node0:0",
        "b node0:0 -> node0:1",
        "gradient of r node0:1 -> node0:0",
        "gradient of a node0:0 -> node0:1",
    ]


@pytest.mark.parametrize("shape", [{"feature": 4}, {"seq": 4, "feature": 1}])
def test_global_batch_norm_sums_its_statistics(shape):
    norm = op("n", ["a"], 4, 0, kind="batch_norm")
    norm = structs.replace(norm, shape={"sample": 8, **shape})
    graph, profile = model([op("a", ["x"], 4, 80), norm, op("b", ["n"], 4)], (2.0, 4.0))
    plans = dict.fromkeys("anb", BY_SAMPLES)
    local = simulate(graph, profile, cluster_of(), plans)
    options = SimulatorOptions(batch_norm="global")
    found = simulate(graph, profile, cluster_of(), plans, options=options)
    # Forward two all-reduces of 4 features in 8 B, 2 s each; backward one of twice as many.
    assert [e for e in timeline(found) if "statistics" in e[0]] == [
        ("statistics of n", 2.0, 6.0),
        ("gradient of statistics of n", 11.0, 15.0),
    ]
    assert found.step_s == local.step_s + 4 + 4

"""Fill, drain and memory of pipelines by every schedule."""

import numpy as np
import pytest
from msgspec.structs import replace
from simulated import ZERO, chain, cluster_of, model, op, profile_of, row, simulate, timeline

from harness.domain.strategy import OperatorPlan, Stage
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import binding, spans


def two_stages(schedule, n_microbatches, recompute=False, bandwidth=np.inf):
    graph, profile = chain()
    profile = profile_of(graph, {"a": (2.0, 4.0), "b": (2.0, 4.0)})
    cluster = cluster_of(bandwidth=1e30 if np.isinf(bandwidth) else bandwidth)
    return simulate(
        graph,
        profile,
        cluster,
        {"a": ZERO, "b": OperatorPlan({}, [1], 1)},
        n_microbatches=n_microbatches,
        schedule=schedule,
        stages=[Stage(recompute), Stage(recompute)],
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_balanced_pipeline_takes_fill_and_drain_of_one_stage(schedule):
    # 4 microbatches of 0.5 + 1 s on each of 2 stages: (4 + 2 - 1) * 1.5.
    assert two_stages(schedule, 4).step_s == pytest.approx(7.5, abs=1e-12)


def test_1f1b_holds_fewer_activations_than_gpipe():
    assert two_stages("gpipe", 4).memory_bytes["node0:0"] == 240 + 4 * 8
    assert two_stages("1f1b", 4).memory_bytes["node0:0"] == 240 + 2 * 8


@pytest.mark.parametrize(
    ("schedule", "n_microbatches", "buffers"),
    [
        # The first stage has received gradients of the other microbatches in flight. Others have
        # received the next input and a gradient, and their last gradient is on its way.
        ("1f1b", 8, [2, 3, 2]),
        ("1f1b", 1, [0, 0, 0]),
        ("gpipe", 4, [3, 3, 0]),
        ("gpipe", 16, [6, 6, 0]),
    ],
)
def test_receives_that_are_posted_ahead_and_gradients_on_their_way_are_in_memory(
    schedule, n_microbatches, buffers
):
    operators = [op(name, [last], 400, 8) for last, name in zip("xab", "abc", strict=True)]
    plans = {name: OperatorPlan({}, [k], k) for k, name in enumerate("abc")}

    def run(**attrs):
        known = [replace(one, attrs=attrs) for one in operators]
        graph, profile = model(known)
        how = {"batch": 8 * n_microbatches, "stages": [Stage()] * 3, "schedule": schedule}
        cluster = cluster_of(3, memory=10**9)
        return simulate(graph, profile, cluster, plans, n_microbatches=n_microbatches, **how)

    held = run(kept_bytes=3200, inner_bytes=0).outcome.memory_bytes
    # Without what autograd saves, which is of other programs, neither they nor gradients count.
    bare = run().outcome.memory_bytes + 3200 * np.array([1, 2, 2])
    assert np.round((held - bare) / 3200, 1).tolist() == buffers


def test_a_stage_that_recomputes_in_segments_holds_one_of_them_and_what_crosses_its_cuts():
    graph, profile = row(dict.fromkeys("abcdef", 10))
    plans = dict.fromkeys("abcdef", ZERO)

    def run(stage):
        found = simulate(graph, profile, cluster_of(), plans, stages=[stage])
        return found.step_s, found.memory_bytes["node0:0"]

    (plain_s, plain), (cut_s, cut) = run(Stage()), run(Stage(recompute=True, segments=2))
    # Beside weights and optimizer state of 120 B: six outputs of 32 B and one gradient of 10 B; or
    # the output at the cut, three of the last segment, and one gradient.
    assert plain == 120 + 6 * 32 + 10
    assert cut == 120 + (1 + 3) * 32 + 10
    assert cut_s == plain_s + 3 * 1.0  # the last segment need not run again


def test_a_device_runs_again_what_lies_between_its_exchanges_and_keeps_what_it_exchanged():
    graph, profile = row(dict.fromkeys("abcd", 10))
    plans = {name: OperatorPlan({}, [int(name == "c")]) for name in "abcd"}
    found = simulate(
        graph, profile, cluster_of(bandwidth=1e30), plans, n_microbatches=2,
        stages=[Stage(recompute=True)],
    )  # fmt: skip
    # Beside weights and optimizer state of 60 B: sent and received values of both
    # microbatches, 16 B each time, d's output, and its gradient of 10 B.
    assert found.memory_bytes["node0:0"] == 60 + 2 * (16 + 16) + 16 + 10
    ran = [name.split(" #")[0] for name, *_ in timeline(found) if "->" not in name]
    again = ["recompute d", "d", "recompute a", "recompute b", "b", "a"]
    assert [name for name in ran if name[-1] != "c"] == [*"abdabd", *again, *again]


def test_weight_passes_fill_the_bubble_of_zero_bubble():
    # Rank 1 starts after one forward (0.5 s) and then never waits: 4 * (0.5 + 0.5 + 0.5).
    assert two_stages("zero_bubble", 4).step_s == pytest.approx(6.5, abs=1e-12)


def test_the_next_step_fills_a_pipeline_while_this_one_drains():
    seconds = {"a": (1.0, 2.0), "b": (2.0, 4.0)}
    graph, profile = model([op("a", ["x"], 4, 10), op("b", ["a"], 2, 60)], seconds)
    plans = {"a": ZERO, "b": OperatorPlan({}, [1], 1)}
    options = SimulatorOptions(optimizer_s_per_byte=0.1)
    found = simulate(
        graph, profile, cluster_of(bandwidth=1e30), plans, stages=[Stage()] * 2, options=options
    )
    # A step alone takes 13 s: a 1, b 2 + 4, then b's optimizer 6. Beside that a has its backward,
    # its optimizer of 1 s, and the next forward, so that b's device works all the time.
    computed = [event for event in timeline(found) if "->" not in event[0]]
    assert computed == [("a", 0, 1), ("b", 3, 5), ("b", 5, 9), ("a", 9, 11)]
    assert found.step_s == pytest.approx(12.0)
    assert found.outcome.device_begin_s == pytest.approx([0.0, 3.0])
    steps = {rank: own[-1] for rank, own in spans(found).items()}
    assert (steps[1].kind, steps[1].start_s, steps[1].duration_s) == ("step", 3.0, found.step_s)
    assert {name: s for name, s in binding(found).items() if s > 1e-9} == pytest.approx(
        {
            "node0:1": 6.0,
            "the step before on node0:1": 3.0,
            "node0:0": 2.0,
            "optimizer of node0:0": 1.0,
        }
    )


def test_recomputation_costs_a_forward_and_saves_activations():
    plain, again = two_stages("gpipe", 4), two_stages("gpipe", 4, recompute=True)
    # Rank 1 is done with B0 at 4.0; then rank 0 repeats backward 1 s, recomputation 0.5 s, and
    # only its first recomputation is hidden: 4 + 4 * 1 + 3 * 0.5.
    assert (plain.step_s, again.step_s) == pytest.approx((7.5, 9.5), abs=1e-12)
    # Rank 0 keeps the 8 B that it sent of each microbatch, rank 1 the 8 B that it received, with
    # 4 B of its own output at the peak instead of 4 times that.
    assert again.memory_bytes == {"node0:0": 240 + 4 * 8, "node0:1": 120 + 4 * 8 + 4}
    assert plain.memory_bytes == {"node0:0": 240 + 4 * 8, "node0:1": 120 + 4 * (8 + 4)}


def test_transfers_pace_the_pipeline_when_they_are_slowest():
    # A microbatch of 8 bytes takes 1 s: arrivals at 1.5, 2.5, 3.5, 4.5; rank 1 runs its forwards
    # until 5 and its backwards until 9; the last gradient arrives at 10.
    assert two_stages("gpipe", 4, bandwidth=8.0).step_s == pytest.approx(11.0, abs=1e-12)

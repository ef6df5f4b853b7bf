"""What devices compute and hold, in order, by hand-sized graphs; changes priced as the whole."""

import itertools
import random

import msgspec
import numpy as np
import pytest
from made_graphs import changed
from simulated import (
    BY_SAMPLES,
    ONE,
    ZERO,
    chain,
    cluster_of,
    profile_of,
    random_case,
    random_plan,
    simulate,
    simulate_chain,
    talking,
    timeline,
)

from harness.domain.profile import OptimizerTime, Profile, WholeStep
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import ClusterError, PlanError, StrategyError
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import (
    binding,
    critical_path,
    device_seconds,
    events,
    explain,
    spans,
)
from harness.plan.simulate.simulator import Simulator, Trial


def test_one_device_runs_forward_and_backward_in_order():
    found = simulate_chain(ZERO, ZERO)
    assert timeline(found) == [("a", 0, 1), ("b", 1, 3), ("b", 3, 7), ("a", 7, 9)]
    # Weights, gradients, one optimizer state, and a's output in its backward, as b's is freed.
    assert found.memory_bytes == {"node0:0": 3 * 120 + 32, "node0:1": 0}


def test_devices_that_read_samples_hold_all_their_inputs_for_the_whole_step():
    graph, profile = chain()
    fed = changed(graph, "x", activation_bytes=8 * 100)
    plans = {"a": BY_SAMPLES, "b": ONE}
    held = [
        simulate(one, profile, cluster_of(), plans, n_microbatches=2).memory_bytes
        for one in (graph, fed)
    ]
    assert {name: held[1][name] - n for name, n in held[0].items()} == {
        "node0:0": 400, "node0:1": 400,
    }  # fmt: skip


def test_microbatches_of_unlike_sizes_take_what_their_samples_take():
    found = simulate_chain(ZERO, ZERO, n_microbatches=3)  # of 3, 3 and 2 samples
    assert found.step_s == pytest.approx(9)
    sent = [
        end - start
        for name, start, end in timeline(simulate_chain(ZERO, ONE, n_microbatches=3))
        if name.startswith("a node0:0 -> node0:1")
    ]
    assert sent == pytest.approx([2 / 3] * 3)  # 32 B at 16 B/s in all
    # Of the largest microbatch; b's first output is freed before a's gradient.
    assert found.memory_bytes["node0:0"] == 3 * 120 + 3 * 6 * 3 - 6


def test_feature_parallel_gathers_and_needs_no_synchronisation():
    found = simulate_chain(OperatorPlan({"feature": 2}, [0, 1]), ZERO)
    # Half of a's output (16 bytes) crosses, 1 s each way.
    assert timeline(found) == [
        ("a", 0, 0.5),
        ("a", 0, 0.5),
        ("a node0:1 -> node0:0", 0.5, 1.5),
        ("b", 1.5, 3.5),
        ("b", 3.5, 7.5),
        ("a", 7.5, 8.5),
        ("gradient of a node0:0 -> node0:1", 7.5, 8.5),
        ("a", 8.5, 9.5),
    ]


def test_slow_device_takes_longer_and_shares_balance_it():
    cluster = cluster_of(bandwidth=1e30).scaled([1, 1 / 3])
    fair = OperatorPlan({"sample": [3, 1]}, [0, 1])
    assert simulate_chain(BY_SAMPLES, BY_SAMPLES, cluster).step_s == pytest.approx(9 / 2 * 3)
    assert simulate_chain(fair, fair, cluster).step_s == pytest.approx(9 * 3 / 4)


def test_operators_are_calibrated_to_the_measured_step():
    graph, profile = chain()
    step = WholeStep(
        device_kind="device", batch=8, dtype="float32", step_s=18.0, operators_s=9.0,
        graph_hash=graph.content_hash(),
    )  # fmt: skip
    other = msgspec.structs.replace(step, dtype="bfloat16", step_s=36.0)  # not what runs
    profile = msgspec.structs.replace(profile, whole_steps=[step, other])
    assert simulate(graph, profile, cluster_of(), {"a": ZERO, "b": ZERO}).step_s == 18.0


def test_a_part_of_an_operator_takes_the_host_as_long_as_the_whole():
    graph, profile = chain()
    step = WholeStep(
        device_kind="device", batch=8, dtype="float32", step_s=9.0, operators_s=9.0,
        graph_hash=graph.content_hash(), is_queued=True,
    )  # fmt: skip
    small = msgspec.structs.replace(step, batch=1, step_s=6.0, operators_s=9 / 8)
    profile = msgspec.structs.replace(profile, whole_steps=[step, small])
    cut = {name: OperatorPlan({"feature": 2}, [0, 1]) for name in ("a", "b")}
    assert simulate(graph, profile, cluster_of(bandwidth=1e30), cut).step_s == pytest.approx(6.0)
    slower = msgspec.structs.replace(small, step_s=2.0)
    profile = msgspec.structs.replace(profile, whole_steps=[step, slower])
    assert simulate(graph, profile, cluster_of(bandwidth=1e30), cut).step_s == pytest.approx(4.5)


def test_each_kind_of_device_has_its_own_times():
    graph, profile = chain()
    other = profile_of(graph, {"a": (5.0, 0.0), "b": (5.0, 0.0)}, kind="old")
    both = Profile(model="g", measurements=profile.measurements + other.measurements)
    first, second = cluster_of().devices
    cluster = cluster_of().with_devices([first, msgspec.structs.replace(second, kind="old")])
    assert simulate(graph, both, cluster, {"a": ONE, "b": ONE}).step_s == 10.0


def test_optimizer_runs_at_the_end_on_what_a_device_owns():
    found = simulate_chain(ZERO, ZERO, options=SimulatorOptions(optimizer_s_per_byte=0.01))
    assert found.step_s == pytest.approx(9 + 1.2)
    assert device_seconds(found, 0) == pytest.approx(
        {"forward": 3, "backward": 6, "exposed": 0, "optimizer": 1.2}
    )


def test_an_optimizer_that_was_not_timed_takes_as_long_by_its_accesses():
    cluster, (_, profile) = cluster_of(), chain()
    kind = cluster.devices[0].kind
    time = OptimizerTime(device_kind=kind, optimizer="momentum", s_per_byte=0.8)
    timed = msgspec.structs.replace(profile, optimizers=[time])
    found = SimulatorOptions().with_optimizer("adamw", timed, cluster)
    assert found.optimizer_s_per_byte == pytest.approx((2.0, 2.0))
    assert found.stream_s_per_byte == pytest.approx((0.1, 0.1))


def test_an_average_is_one_more_state_and_three_more_accesses():
    cluster, (_, profile) = cluster_of(), chain()
    kind = cluster.devices[0].kind
    time = OptimizerTime(device_kind=kind, optimizer="adamw", s_per_byte=2.0)
    timed = msgspec.structs.replace(profile, optimizers=[time])
    found = SimulatorOptions().with_optimizer("adamw", timed, cluster, is_averaging=True)
    assert (found.n_optimizer_states, found.stream_s_per_byte) == (3, (0.1, 0.1))
    assert found.optimizer_s_per_byte == pytest.approx((2.3, 2.3))


def test_records_are_those_of_a_measured_run():
    by_rank = spans(simulate_chain(ZERO, ONE))
    assert {span.step for own in by_rank.values() for span in own} == {0}
    assert [(s.kind, s.start_s) for s in by_rank[1]] == [
        ("communication", 1.0),
        ("forward", 3.0),
        ("backward", 5.0),
        ("communication", 9.0),
        ("step", 0.0),
    ]
    assert by_rank[0][1].n_bytes == 32


def test_the_critical_path_names_what_binds():
    found = simulate_chain(ZERO, ONE, cluster_of(bandwidth=1.0))
    assert [event.span.label for event in critical_path(found)] == [
        "a",
        "a node0:0 -> node0:1",
        "b",
        "b",
        "gradient of a node0:1 -> node0:0",
        "a",
    ]
    assert next(iter(binding(found))) in ("link node0:0 -> node0:1", "link node0:1 -> node0:0")
    assert sum(binding(found).values()) == pytest.approx(found.step_s)
    assert any("busiest: link" in line for line in explain(found))


def test_out_of_memory_is_predicted_and_names_the_device():
    graph, profile = chain()
    simulator = Simulator(graph, profile, cluster_of(memory=390))
    found = simulator.simulate(Strategy(name="s", batch=8, operators={"a": ZERO, "b": ZERO}))
    assert not found.fits
    with pytest.raises(PlanError, match="needs 392 B on device node0:0, which has 390 B"):
        found.check_memory()
    assert simulator.step_s(found.strategy) == np.inf


def test_bad_input_gets_its_error():
    graph, profile = chain()
    with pytest.raises(StrategyError, match="device 7, the cluster has devices 0 to 1"):
        simulate_chain(ZERO, OperatorPlan({}, [7]))
    with pytest.raises(PlanError, match="measured for graph"):
        Simulator(graph, msgspec.structs.replace(profile, graph_hash="abc"), cluster_of())
    with pytest.raises(PlanError, match="no device kind 'T4'"):
        simulate_chain(ZERO, ZERO, cluster_of(kind="T4"))
    with pytest.raises(ClusterError, match="no link node0:0 -> node0:1"):
        Simulator(graph, profile, msgspec.structs.replace(cluster_of(), links=[]))
    with pytest.raises(PlanError, match="a bucket needs a byte"):
        SimulatorOptions(bucket_bytes=0)
    with pytest.raises(PlanError, match="a byte of memory takes -1 s"):
        SimulatorOptions(stream_s_per_byte=-1)


def test_delta_simulation_equals_the_full_one_on_hundreds_of_moves():
    rng = random.Random(0)
    n_moves = n_sums = 0
    for case in range(10):
        graph, profile, cluster = random_case(rng)
        operators = graph.operators[1:]
        plans = {o.name: random_plan(rng, cluster.n_devices, o) for o in operators}
        n_microbatches = rng.choice([1, 2, 4])
        flow = {
            "n_microbatches": n_microbatches,
            "stages": [Stage(True, 1 + case % 2) if case % 3 == 0 else Stage()],
        }
        options = SimulatorOptions(
            overlap=case % 4 != 0, bucket_bytes=100, batch_norm=rng.choice(["local", "global"])
        )
        if case == 9:
            cluster = talking(cluster, *[0.01] * cluster.n_devices)
        kept = Simulator(graph, profile, cluster, options=options)
        trial = Trial(kept, Strategy(name="s", batch=8, operators=plans, **flow))
        for _ in range(40):
            for operator in rng.sample(operators, k=rng.choice([1, 1, 1, 2])):
                plan = random_plan(rng, cluster.n_devices, operator, 8 // n_microbatches)
                plans[operator.name] = plan
                trial.replace(graph.index()[operator.name], plan)
            delta = trial.outcome()
            fresh = Simulator(graph, profile, cluster, options=options)
            full = Trial(fresh, Strategy(name="s", batch=8, operators=plans, **flow)).outcome()
            assert delta.step_s == full.step_s
            assert (delta.memory_bytes == full.memory_bytes).all()
            for name in ("start", "finish", "cause", "busy", "device_end_s"):
                np.testing.assert_array_equal(getattr(delta, name), getattr(full, name))
            n_moves += 1
            n_sums += len(delta.lowered.edges.sums)
    assert n_moves == 400
    assert n_sums > 20


def test_no_device_and_no_link_does_two_things_at_once():
    rng = random.Random(2)
    for _ in range(30):
        graph, profile, cluster = random_case(rng)
        plans = {o.name: random_plan(rng, cluster.n_devices) for o in graph.operators[1:]}
        found = simulate(graph, profile, cluster, plans, n_microbatches=2)
        by_resource = {}
        for event in events(found):
            if len(event.ranks) <= 2 and "all-reduce" not in event.span.label:
                by_resource.setdefault(event.resource, []).append(event)
        for name, own in by_resource.items():
            for before, after in itertools.pairwise(own):
                busy = before.span.duration_s
                if name.startswith("link"):  # latency does not occupy the link
                    link = next(
                        link
                        for link in cluster.links
                        if name == f"link {link.source} -> {link.target}"
                    )
                    busy = before.span.n_bytes / link.bandwidth_bytes_per_s
                assert after.span.start_s >= before.span.start_s + busy - 1e-9

"""What ranks wait for because none computes evenly: against random runs."""

import math
import random

import numpy as np
import pytest
from msgspec.structs import replace
from simulated import chain, cluster_of, op, profile_of, simulate, timeline, two_linears, uneven

from harness.domain import cluster as domain
from harness.domain.graph import Graph
from harness.domain.schedule import rank_actions
from harness.domain.strategy import OperatorPlan, Stage
from harness.plan.simulate.jitter import Jitter
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import binding


def jitter_of(points, n=2):
    (node,) = cluster_of(n).nodes
    curve = [domain.Jitter(computing_s=s, deviation_s=d) for s, d in points]
    devices = [replace(device, jitter=curve) for device in node.devices]
    return Jitter(domain.Cluster(nodes=[replace(node, devices=devices)]))


def test_pauses_that_fall_anywhere_add_up_as_variances():
    jitter = jitter_of([(1.0, 2.0), (5.0, 4.0)], n=1)
    lengths = np.array([[0.5, 1.0, 3.0, 5.0, 10.0]])
    assert jitter.variance(lengths).tolist() == [[4.0, 4.0, 10.0, 16.0, 32.0]]
    assert jitter.is_measured
    assert not Jitter(cluster_of()).is_measured


@pytest.mark.parametrize("computing_s", [[1.0, 1.0], [1.0, 1.2, 0.9], [1.0, 1.0, 1.0, 0.5, 1.0]])
def test_the_last_of_a_group_is_as_late_as_in_random_draws(computing_s):
    means = np.array(computing_s)
    jitter = jitter_of([(1e-9, 0.1), (9.0, 0.1)], n=len(means))
    draws = np.random.default_rng(0).normal(means, 0.1, size=(200_000, len(means)))
    expected = draws.max(axis=1).mean() - means.max()
    assert jitter.group(range(len(means)), means) == pytest.approx(expected, rel=0.03)


def test_what_deviates_is_what_each_computes_between_two_meetings():
    jitter = jitter_of([(1.0, 3.0)])
    # The first waits for the second four times in its 4 s, the second never for the first.
    senders, own = jitter.transfers(np.array([4.0, 8.0]), np.array([[0, 0], [4, 0]]))
    assert senders.tolist() == [[0.0, 0.0], [18.0, 0.0]]
    assert own.tolist() == [9.0, 0.0]


def test_a_transfer_deviates_only_where_it_arrives_as_the_receiver_is_ready():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])}
    even = simulate(graph, profile, cluster_of(), plans)
    jittery = simulate(graph, profile, uneven(cluster_of(), 0.1, 0.1), plans)
    # Nobody has anything else to do: who receives has long waited.
    assert timeline(jittery) == timeline(even)


def test_an_all_reduce_begins_when_the_last_is_there_unless_the_network_is_busy():
    graph, profile, cluster, plans = two_linears(4)
    even = simulate(graph, profile, cluster, plans)
    jittery = simulate(graph, profile, uneven(cluster, *4 * [0.1]), plans)
    # Partial sums forward and back: 9 s of computing, of which the half deviates by 0.21 s, and the
    # last of four is 1.03 deviations late.
    assert jittery.step_s - even.step_s == pytest.approx(2 * 1.03 * 0.1 * 4.5**0.5, rel=0.02)
    slow = cluster_of(2, bandwidth=0.01)
    halves = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b", "c")}
    options = SimulatorOptions(bucket_bytes=1)
    steps_s = [
        simulate(graph, profile, found, halves, options=options).step_s
        for found in (slow, uneven(slow, 1.0, 1.0))
    ]
    # Two buckets queue for hours: only the first of them waits for who is late, by 0.56 deviations
    # of half of the step.
    assert steps_s[1] - steps_s[0] == pytest.approx(0.564 * 9**0.5, rel=0.02)


def random_runs(n_stages, n_microbatches, forward, backward, n_runs):
    """Mean seconds of a step of 1F1B among others; forward and backward are (mean, deviation)."""
    rng = random.Random(0)
    numbers = {"n_stages": n_stages, "n_microbatches": n_microbatches, "n_ranks": n_stages}
    actions = [list(rank_actions("1f1b", **numbers, rank=rank)) for rank in range(n_stages)]
    totals = []
    for _ in range(n_runs):
        ends, of_steps = [0.0] * n_stages, []
        for _ in range(6):
            done, at = {}, [0] * n_stages
            while any(at[s] < len(actions[s]) for s in range(n_stages)):
                for s in range(n_stages):
                    while at[s] < len(actions[s]):
                        kind, m, _ = actions[s][at[s]]
                        source = s - 1 if kind == "forward" else s + 1
                        if 0 <= source < n_stages and (kind, m, source) not in done:
                            break
                        start = max(ends[s], done.get((kind, m, source), 0.0))
                        mean, deviation = forward if kind == "forward" else backward
                        ends[s] = start + max(0.3 * mean, rng.gauss(mean, deviation))
                        done[kind, m, s] = ends[s]
                        at[s] += 1
            of_steps.append(max(ends))
        totals.append((of_steps[-1] - of_steps[1]) / (len(of_steps) - 2))
    return sum(totals) / n_runs


@pytest.mark.parametrize("beside", [[], ["early"]])
def test_stages_meet_once_in_a_pass_however_many_values_travel(beside):
    operators = [
        op("x", [], 4, kind="input"),
        op("early", ["x"], 4, 4),
        op("a", ["early"], 4, 4),
        op("b", ["a"], 4, 4),
        op("c", ["b", *beside], 4, 4),
    ]
    graph = Graph(name="skip", batch=8, operators=operators)
    seconds = {"early": (0.0, 0.0), "a": (8.0, 16.0), "b": (8.0, 16.0), "c": (0.0, 0.0)}
    plans = {name: OperatorPlan({}, [0]) for name in ("early", "a")}
    plans |= {name: OperatorPlan({}, [1], 1) for name in ("b", "c")}
    found = simulate(
        graph,
        profile_of(graph, seconds),
        uneven(cluster_of(bandwidth=1e12), 0.4, 0.4),
        plans,
        n_microbatches=8,
        schedule="1f1b",
        stages=[Stage(), Stage()],
    )
    random_s = random_runs(2, 8, (1.0, 0.4), (2.0, 0.4 * 2**0.5), 500)
    assert found.step_s == pytest.approx(random_s, rel=0.01)


@pytest.mark.parametrize(
    ("n_stages", "n_microbatches", "forward_s", "deviation_s"),
    [(3, 12, 0.025, 0.0065), (2, 8, 0.030, 0.0075), (5, 20, 0.015, 0.0045)],
)
def test_a_pipeline_takes_as_long_as_random_runs_on_average(
    n_stages, n_microbatches, forward_s, deviation_s
):
    names = [f"o{i}" for i in range(n_stages)]
    operators = [op("x", [], 4, kind="input")]
    operators += [
        op(name, [before], 4, 4) for name, before in zip(names, ["x", *names], strict=False)
    ]
    operators = [replace(o, shape={**o.shape, "sample": n_microbatches}) for o in operators]
    graph = Graph(name="even", batch=n_microbatches, operators=operators)
    whole = (n_microbatches * forward_s, 2 * n_microbatches * forward_s)
    profile = profile_of(graph, dict.fromkeys(names, whole))
    plans = {name: OperatorPlan({}, [i], i) for i, name in enumerate(names)}
    stages = [Stage()] * n_stages
    cluster = cluster_of(n_stages, bandwidth=1e12)
    flow = {"n_microbatches": n_microbatches, "schedule": "1f1b", "stages": stages}
    deviations = [deviation_s] * n_stages
    jittery = uneven(cluster, *deviations, computing_s=forward_s)
    even, found = (
        simulate(graph, profile, nodes, plans, batch=n_microbatches, **flow)
        for nodes in (cluster, jittery)
    )
    passes = (forward_s, deviation_s), (2 * forward_s, math.sqrt(2) * deviation_s)
    expected = random_runs(n_stages, n_microbatches, *passes, n_runs=40)
    without = random_runs(n_stages, n_microbatches, (forward_s, 0), (2 * forward_s, 0), n_runs=1)
    assert even.step_s == pytest.approx(without)
    assert even.step_s < 0.96 * expected
    assert found.step_s == pytest.approx(expected, rel=0.02)
    shares = binding(found)
    assert sum(shares.values()) == pytest.approx(found.step_s)
    assert "jitter" not in binding(even)
    assert shares["jitter"] > 0.02 * found.step_s

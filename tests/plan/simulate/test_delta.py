"""What a search asks: changes priced anew equal the whole, over random strategies."""

import itertools
import random

import numpy as np
import pytest
from simulated import random_case, random_plan, simulate, talking

from harness.domain.strategy import Stage, Strategy
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import events
from harness.plan.simulate.simulator import Simulator, Trial


@pytest.mark.parametrize("seed", range(2))
def test_delta_simulation_equals_the_full_one_on_hundreds_of_moves(seed):
    rng = random.Random(seed)
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
            overlap=case % 4 != 0,
            bucket_bytes=100,
            batch_norm=rng.choice(["local", "global"]),
        )
        if case == 9:
            cluster = talking(cluster, *[0.01] * cluster.n_devices)
        kept = Simulator(graph, profile, cluster, options=options)
        trial = Trial.from_strategy(kept, Strategy(name="s", batch=8, operators=plans, **flow))
        for _ in range(40):
            for operator in rng.sample(operators, k=rng.choice([1, 1, 1, 2])):
                plan = random_plan(rng, cluster.n_devices, operator, 8 // n_microbatches)
                plans[operator.name] = plan
                trial.replace(graph.index()[operator.name], plan)
            delta = trial.outcome()
            fresh = Simulator(graph, profile, cluster, options=options)
            full = Trial.from_strategy(
                fresh, Strategy(name="s", batch=8, operators=plans, **flow)
            ).outcome()
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
            if len(event.ranks) <= 2 and "all-reduce" not in event.name:
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

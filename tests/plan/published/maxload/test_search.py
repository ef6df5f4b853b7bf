"""The maximum-load search against plain enumeration by an independent reading of the problem."""

import itertools
import math
import random

import numpy as np
import pytest
from made_graphs import profile_of

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import validate
from harness.errors import PlanError
from harness.plan.costs import PlanRequest, run
from harness.plan.published.maxload.problem import LoadProblem, Value, merge_free
from harness.plan.published.maxload.search import search
from harness.plan.report import result_lines

RELATIVE = 1e-9  # prefix sums and single sums round differently
FEW_MOVES = 0.02


def random_problem(rng, n, n_devices):
    """A DAG with branches; values with several readers, some of which lie before the producer, as
    gradients have them; some operators cost nothing."""
    producers = [
        [j for j in range(i) if rng.random() < (0.5 if j == i - 1 else 0.25)] for i in range(n)
    ]
    values = [
        Value(rng.choice([0.0, 1.0, 2.0, 7.0]), tuple(sorted(rng.sample(range(n), size))))
        for size in rng.choices([2, 2, 3], k=n)
    ]
    return LoadProblem(
        names=[f"op{i}" for i in range(n)],
        seconds=[rng.choice([0.0, 0.0, 1.0, 3.0, 8.0]) for _ in range(n)],
        n_bytes=[rng.choice([1.0, 5.0]) for _ in range(n)],
        producers=producers,
        values=values,
        n_devices=n_devices,
        memory_bytes=rng.choice([math.inf, 14.0]),
    )


def load(problem, placement):
    """Greatest load: each device sends what others read, and receives what it lacks."""
    loads = [0.0] * problem.n_devices
    for i, device in enumerate(placement):
        loads[device] += problem.seconds[i]
    for seconds, operators in problem.values:
        devices = {placement[i] for i in operators}
        for device in devices if len(devices) > 1 else ():
            loads[device] += seconds
    return max(loads)


def placements(problem, *, contiguous):
    """That fit the memory; contiguous ones go from device 0 to the last along every edge."""
    found = []
    for placement in itertools.product(range(problem.n_devices), repeat=problem.n_operators):
        held = [0.0] * problem.n_devices
        for i, device in enumerate(placement):
            held[device] += problem.n_bytes[i]
        follows = all(
            placement[p] <= placement[i] for i, own in enumerate(problem.producers) for p in own
        )
        if max(held) <= problem.memory_bytes and (follows or not contiguous):
            found.append(placement)
    return found


def least(problem, *, contiguous):
    found = placements(problem, contiguous=contiguous)
    return min((load(problem, each) for each in found), default=math.inf)


@pytest.mark.parametrize("seed", range(20))
def test_contiguous_stages_are_optimal_and_free_ones_between_their_bounds(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(3, 7), rng.randint(1, 3))
    best = least(merge_free(problem).problem, contiguous=True)
    found = search(problem, effort=FEW_MOVES)
    if found is None:
        assert best == math.inf
        return
    assert found.is_exact
    assert found.contiguous.load_s == pytest.approx(best, rel=RELATIVE)
    assert load(problem, tuple(found.contiguous.device_of)) == pytest.approx(best, rel=RELATIVE)
    assert load(problem, tuple(found.free.device_of)) == pytest.approx(found.free.load_s)
    assert np.bincount(found.free.device_of, problem.n_bytes).max() <= problem.memory_bytes
    least_s = least(problem, contiguous=False)
    assert found.bound_s <= least_s * (1 + RELATIVE)
    assert found.free.load_s == pytest.approx(least_s, rel=RELATIVE)


def test_a_sample_of_the_cuts_gives_a_plan_and_a_bound_below_the_optimum():
    rng = random.Random(3)
    values = [Value(0.5, (i, 11)) for i in range(11)]
    branches = LoadProblem(
        names=[str(i) for i in range(12)],
        seconds=[rng.choice([1.0, 2.0, 3.0]) for _ in range(12)],
        n_bytes=[1.0] * 12,
        producers=[[] for _ in range(11)] + [list(range(11))],
        values=values,
        n_devices=2,
    )
    exact = search(branches, effort=0)
    sample = search(branches, most_sets=60, effort=0)
    assert exact.n_sets == 2**11 + 1
    assert exact.is_exact
    assert sample.n_sets <= 60
    assert not sample.is_exact
    assert sample.contiguous_bound_s <= exact.contiguous.load_s <= sample.contiguous.load_s


def request(n_devices, memory_bytes=1e9):
    """Four operators in a row of 1, 3, 3 and 1 ms, each with 1 kB out at 2 MB/s."""
    names = ["a", "b", "c", "d"]
    operators = [
        Operator(
            name=name, kind="other", inputs=names[max(0, i - 1) : i], activation_bytes=1000,
            shape={"sample": 8},
        )
        for i, name in enumerate(names)
    ]  # fmt: skip
    seconds = dict(
        zip(names, [(1e-3, 2e-3), (3e-3, 6e-3), (3e-3, 6e-3), (1e-3, 2e-3)], strict=True)
    )
    cluster = Cluster.uniform(1, n_devices, inside_bytes_per_s=2e6, memory_bytes=int(memory_bytes))
    graph = Graph(name="row", operators=operators, batch=8)
    return PlanRequest(cluster=cluster, graph=graph, profile=profile_of(graph, seconds))


def test_the_plan_is_a_pipeline_with_its_bound():
    asked = request(2)
    result = run("maxload", asked)
    assert result.predicted_step_s == pytest.approx(12e-3 + 1e-3)  # and one value there and back
    assert result.lower_bound_s == result.predicted_step_s
    assert result.speedup_over_single == pytest.approx(24 / 13)
    assert [result.strategy.operators[name].devices for name in "abcd"] == [[0], [0], [1], [1]]
    assert result.strategy.schedule == "1f1b"
    assert any("optimal" in line for line in result_lines(result))
    validate(result.strategy, asked.graph, asked.cluster)


def test_few_placements_are_not_annealed_for_long(monkeypatch):
    moves = []

    def chain(joined, device_of, n_devices, memory_bytes, n_moves, *others):
        moves.append(n_moves)
        return device_of, math.inf

    monkeypatch.setattr("harness.plan.published.maxload.search._run_chain", chain)
    run("maxload", request(2))
    assert max(moves) == 100 * 2**4


def test_too_little_memory_is_refused_with_the_amounts():
    with pytest.raises(PlanError, match=r"contiguous stages fits .* on each of 2 devices"):
        run("maxload", request(2, memory_bytes=3000))

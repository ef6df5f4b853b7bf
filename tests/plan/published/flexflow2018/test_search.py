"""The 2018 cost model and the search on it: published figures, steps by hand, exact deltas."""

import itertools
import math

import msgspec
import numpy as np
import pytest

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.errors import PlanError
from harness.plan.costs import PlanRequest
from harness.plan.published.flexflow2018.model import (
    CONV,
    FLATTEN,
    LINEAR,
    POOL,
    Layer,
    LayerCut,
    LayerProblem,
    Machine,
    format_plan,
    part_ms,
    to_strategy,
)
from harness.plan.published.flexflow2018.search import (
    BEST,
    CURRENT,
    N_BOUNDED,
    new_chain,
    propose,
    restart,
    schedule,
    search,
    walk,
)
from harness.plan.published.flexflow2018.search import plan as plan_request
from harness.plan.published.flexflow2018.simulation import (
    build_tables,
    decode,
    encode,
    simulate,
    step_ms,
)

TOPOLOGIES = [(1, 2), (1, 4), (2, 4), (4, 4)]
BARS_MS = {(1, 2): 47.304, (1, 4): 52.012, (2, 4): 64.615, (4, 4): 86.035}


def request(n_nodes, n_devices, **changes):
    cluster = Cluster.uniform(n_nodes, n_devices, inside_bytes_per_s=4e9, memory_bytes=16 * 10**9)
    return PlanRequest(**{"cluster": cluster, **changes})  # type: ignore[arg-type]


def chain_at(problem, plan, seed):
    chain = new_chain(build_tables(problem), encode(plan, problem.machine.n_devices), seed)
    restart(chain, chain.best.copy())
    return chain


@pytest.mark.parametrize("shape", [(1, 2), (2, 4), (8, 4)])
def test_the_bound_changes_no_decision(shape):
    problem = LayerProblem(Machine(*shape))
    chains = [chain_at(problem, problem.data_parallel(), seed=1) for _ in range(2)]
    for temperature_ms in (20.0, 5.0, 0.5, 0.05):
        for chain, use_bound in zip(chains, (True, False), strict=True):
            walk(chain, 300, temperature_ms, use_bound)
        assert chains[0].cost_ms[CURRENT] == chains[1].cost_ms[CURRENT]
        assert np.array_equal(chains[0].current, chains[1].current)
        assert np.array_equal(chains[0].best, chains[1].best)
    assert chains[0].tally[N_BOUNDED] > 0
    assert chains[1].tally[N_BOUNDED] == 0
    assert chains[0].random[0] == chains[1].random[0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", TOPOLOGIES)
def test_every_seed_finds_the_best_listed_step(shape, seed):
    problem = LayerProblem(Machine(*shape))
    found = search(problem, request(*shape, seed=seed, budget=50_000))
    assert round(step_ms(problem, found.plan), 3) <= BARS_MS[shape]


def small_problems():
    """Three layers with time and traffic in balance, so that the best plan is not obvious."""

    def layers(n_weights, n_out):
        conv = Layer(
            name="conv1", kind=CONV, n_in=40_000, n_out=n_out, n_weights=n_weights, macs=10**6
        )
        linear = Layer(name="linear2", kind=LINEAR, n_in=n_out, n_out=256, n_weights=n_out * 256)
        last = Layer(
            name="linear3", kind=LINEAR, n_in=256, n_out=100, n_weights=25_600, has_softmax=True
        )
        return [conv, linear, last]

    return [
        LayerProblem(machine, layers(n_weights, n_out))
        for machine in (Machine(1, 2), Machine(2, 1))
        for n_weights in (10**3, 10**6)
        for n_out in (512, 20_000)
    ]


@pytest.mark.parametrize("problem", small_problems())
def test_search_equals_exhaustive_search_on_small_problems(problem):
    options = [
        [
            LayerCut(n_samples, n_features, devices)
            for n_samples, n_features in problem.choices(layer)
            for devices in itertools.product(range(2), repeat=n_samples * n_features)
        ]
        for layer in problem.layers
    ]
    best_ms = min(step_ms(problem, plan) for plan in itertools.product(*options))
    chain = chain_at(problem, problem.data_parallel(), seed=1)
    for temperature_ms in (10.0, 1.0, 0.1, 0.01):
        walk(chain, 2000, temperature_ms, True)
    assert chain.cost_ms[BEST] == best_ms


@pytest.mark.parametrize("budget", [0, 1, 999, 12_500, 30_001])
def test_the_budget_is_spent_exactly(budget):
    assert sum(size for _, size, _ in schedule(budget)) == budget
    found = search(LayerProblem(Machine(1, 2)), request(1, 2, budget=budget))
    assert found.n_proposals == budget


def test_a_result_has_the_plan_and_its_step():
    problem = LayerProblem(Machine(2, 4))
    result = plan_request(request(2, 4, budget=20_000, seed=1))
    found = tuple(
        LayerCut(
            plan.partition.get("sample", 1), plan.partition.get("feature", 1), tuple(plan.devices)
        )
        for plan in result.strategy.operators.values()
    )
    assert result.explanation[-13:-1] == format_plan(problem, found)
    assert result.predicted_step_s == step_ms(problem, found) / 1e3
    assert result.strategy == to_strategy(problem, found)
    single_ms = step_ms(problem, problem.single_device())
    step = result.predicted_step_s * 1e3
    assert result.speedup_over_single == pytest.approx(single_ms / step, rel=1e-12)
    assert result.speedup_over_ddp == pytest.approx(0.451692 / result.predicted_step_s, rel=1e-6)
    assert [other.step_s for other in result.runners_up] == sorted(
        other.step_s or 0.0 for other in result.runners_up
    )
    assert result.n_proposals == 20_000
    assert not result.interrupted
    msgspec.json.encode(result)


def test_an_interrupt_returns_the_best_so_far():
    def interrupt(progress):
        if progress.n_proposals > 0:
            raise KeyboardInterrupt

    result = plan_request(request(1, 4, progress=interrupt))
    assert result.interrupted
    assert 0 < result.n_proposals < 250_000
    assert result.predicted_step_s <= 0.0520117  # the standard plans are still in the comparison


def test_seconds_end_the_search():
    found = search(LayerProblem(Machine(1, 2)), request(1, 2, seconds=0.2))
    assert found.n_proposals > 0
    assert found.cpu_s < 5.0


def test_a_plan_is_written_samples_first():
    problem = LayerProblem(Machine(1, 4))
    lines = format_plan(problem, problem.linear_by_feature())
    assert lines[0] == "op[0] conv1:\tdim(4 ) gpu(0 1 2 3 )"
    assert lines[9] == "op[9] linear9:\tdim(1 4 ) gpu(0 1 2 3 )"


@pytest.mark.parametrize(
    ("n_nodes", "n_devices", "changes", "message"),
    [
        (1, 3, {}, "1 nodes of 3 devices make 3"),
        (1, 2, {"batch": 100}, "128 on 2 devices, not 100"),
        (1, 2, {"memory_bytes": 10**6}, "no plan fits: the leanest needs .* the limit is 977 KiB"),
        (1, 2, {"graph": Graph(name="g", operators=[Operator(name="a", kind="other")])}, "not 'g'"),
    ],
)
def test_bad_requests_are_named(n_nodes, n_devices, changes, message):
    with pytest.raises(PlanError, match=message):
        plan_request(request(n_nodes, n_devices, budget=10, **changes))


def test_unequal_nodes_are_refused():
    nodes = Cluster.uniform(2, 2, inside_bytes_per_s=1e9, memory_bytes=10**9).nodes
    small = msgspec.structs.replace(nodes[1], devices=nodes[1].devices[:1])
    with pytest.raises(PlanError, match="these have 1 to 2 devices"):
        plan_request(PlanRequest(cluster=Cluster(nodes=[nodes[0], small])))


@pytest.mark.parametrize(
    ("n_nodes", "n_devices", "printed"),
    [(1, 2, "102.147"), (1, 4, "218.664"), (2, 4, "451.692"), (4, 4, "917.718")],
)
def test_data_parallel_costs_the_published_step(n_nodes, n_devices, printed):
    problem = LayerProblem(Machine(n_nodes, n_devices))
    assert f"{step_ms(problem, problem.data_parallel()):.3f}" == printed


def test_costs_of_parts_by_hand():
    pool = Layer(name="p", kind=POOL, n_in=1_000_000, n_out=250_000)
    assert part_ms(pool, 100, 0) == pytest.approx(1.0 + 0.01 + 2.0 + 0.01)  # 5e8 bytes, then 1e9
    linear = Layer(name="l", kind=LINEAR, n_in=1000, n_out=3200)
    # 6.4e9 FLOPs take 1 ms, the bytes a fraction of that; thrice, each with a launch
    assert part_ms(linear, 1000, 3200) == pytest.approx(3 * 1.01)
    assert part_ms(Layer(name="f", kind=FLATTEN, n_in=9, n_out=9), 64, 9) == 0.0


def flat(n):
    return Layer(name="flat", kind=FLATTEN, n_in=n, n_out=n)


def linear(n_in, n_out):
    return Layer(name="linear", kind=LINEAR, n_in=n_in, n_out=n_out, n_weights=n_in * n_out)


def test_a_device_of_another_node_waits_for_its_samples():
    """128 samples of 4 * 2^20 / 64 bytes leave device 0: 8 ms. Two slices give time back."""
    problem = LayerProblem(Machine(2, 1), [flat(2**14), linear(2**14, 64)])
    plan = (LayerCut(1, 1, (0,)), LayerCut(1, 2, (0, 1)))
    own_ms = part_ms(problem.layers[1], 128, 32)
    assert step_ms(problem, plan) == pytest.approx(8 + own_ms - 2e-4)


def test_transfers_of_different_layers_wait_for_their_common_channel():
    """Part 1 sends 4 ms to part 2 and to part 3, into the second layer and then into the third,
    whose parts 2 and 3 so start at 8 ms, and parts 0 and 1 at 4 ms."""
    layers = [flat(2**14), flat(2**14), linear(2**14, 4)]
    problem = LayerProblem(Machine(4, 1), layers)
    plan = (LayerCut(2, 1, (0, 1)), LayerCut(4, 1, (0, 0, 2, 2)), LayerCut(1, 4, (2, 2, 2, 2)))
    own_ms = part_ms(layers[2], 256, 1)
    assert own_ms < 2
    assert step_ms(problem, plan) == pytest.approx(8 + 2 * own_ms - 4e-4)


def test_synchronisation_of_slices_by_hand():
    """2 nodes x 2; a 4 x 1 linear layer on devices 0, 0, 1, 2: every slice is on all three."""
    layer = linear(2**10, 2**10)
    problem = LayerProblem(Machine(2, 2), [layer])
    # 4 slices of 2^20 bytes: 1/4 ms inside (two devices of node 0), 1 ms between (two nodes);
    # a slice is held by two parts of device 0, one of device 1 and one of device 2.
    own_ms = 2 * part_ms(layer, 64, 1024)
    found_ms = step_ms(problem, (LayerCut(4, 1, (0, 0, 1, 2)),))
    assert found_ms == pytest.approx(own_ms + 4 * (0.25 + 1.0) - 4 * (2**2 + 1 + 1) * 1e-4)
    # Block 0 (slices 0, 1) only on device 0; block 1 on devices 1 and 3, one in each node.
    own_ms = 2 * part_ms(layer, 128, 512)
    found_ms = step_ms(problem, (LayerCut(2, 2, (0, 1, 0, 3)),))
    assert found_ms == pytest.approx(own_ms + 2 * 1.0 - (2 * 2**2 + 2 * (1 + 1)) * 1e-4)


def test_a_limit_refuses_slower_plans_only():
    problem = LayerProblem(Machine(2, 4))
    chain = new_chain(build_tables(problem), encode(problem.data_parallel(), 8), seed=8)
    found = set()
    for _ in range(200):
        propose(chain.tables, chain.trial, chain.random)
        cost_ms = simulate(chain.tables, chain.trial, np.inf)
        assert simulate(chain.tables, chain.trial, cost_ms) == cost_ms
        below_ms = simulate(chain.tables, chain.trial, 0.9 * cost_ms)
        assert below_ms in (math.inf, cost_ms)
        found.add(below_ms == math.inf)
        plan = decode(chain.tables, chain.trial)
        assert decode(chain.tables, encode(plan, 8)) == plan
    assert True in found

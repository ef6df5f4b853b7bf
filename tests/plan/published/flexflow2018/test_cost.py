"""The 2018 cost model: published figures, hand-worked steps, and kernels against plain Python."""

from __future__ import annotations

import math
import random

import pytest

from harness.plan.published.flexflow2018.model import (
    FLATTEN,
    LINEAR,
    POOL,
    Layer,
    LayerCut,
    LayerProblem,
    Machine,
    Plan,
    alexnet,
    part_ms,
    simulate,
    step_ms,
    synchronise,
)
from harness.plan.published.flexflow2018.simulation import (
    build_tables,
    decode,
    encode,
)
from harness.plan.published.flexflow2018.simulation import simulate as simulate_arrays


@pytest.mark.parametrize(
    ("n_nodes", "n_devices", "printed"),
    [(1, 2, "102.147"), (1, 4, "218.664"), (2, 4, "451.692"), (4, 4, "917.718")],
)
def test_data_parallel_costs_the_published_step(n_nodes: int, n_devices: int, printed: str) -> None:
    problem = LayerProblem(Machine(n_nodes, n_devices))
    assert f"{step_ms(problem, problem.data_parallel()):.3f}" == printed
    assert f"{compiled_step_ms(problem, problem.data_parallel()):.3f}" == printed


def test_alexnet_has_the_sizes_of_the_text() -> None:
    sizes = {layer.name: (layer.n_in, layer.n_out) for layer in alexnet()}
    assert sizes["conv1"] == (3 * 224**2, 64 * 55**2)
    assert sizes["pool2"] == (64 * 55**2, 64 * 27**2)
    assert sizes["pool8"] == (256 * 13**2, 256 * 6**2)
    assert sizes["linear9"] == (9216, 4096)
    assert sizes["linear11"] == (4096, 1000)
    assert alexnet()[-1].has_softmax


def test_costs_of_parts_by_hand() -> None:
    pool = Layer(name="p", kind=POOL, n_in=1_000_000, n_out=250_000)
    assert part_ms(pool, 100, 0) == pytest.approx(1.0 + 0.01 + 2.0 + 0.01)  # 5e8 bytes, then 1e9
    linear = Layer(name="l", kind=LINEAR, n_in=1000, n_out=3200)
    # 6.4e9 FLOPs take 1 ms, the bytes a fraction of that; thrice, each with a launch
    assert part_ms(linear, 1000, 3200) == pytest.approx(3 * 1.01)
    assert part_ms(Layer(name="f", kind=FLATTEN, n_in=9, n_out=9), 64, 9) == 0.0


def flat_then_linear() -> list[Layer]:
    """Two layers whose transfers are of 4 * 2^20 / 64 bytes a sample."""
    n = 2**20 // 64
    return [
        Layer(name="flat", kind=FLATTEN, n_in=n, n_out=n),
        Layer(name="linear1", kind=LINEAR, n_in=n, n_out=64, n_weights=n * 64),
    ]


def test_timeline_of_two_layers_by_hand() -> None:
    """All samples on device 0: device 1, in the other node, waits for 128 samples at 1 / 16 ms."""
    problem = LayerProblem(Machine(2, 1), flat_then_linear())
    plan = (LayerCut(1, 1, (0,)), LayerCut(1, 2, (0, 1)))
    tasks = {task.order: task for task in simulate(problem, plan)}
    transfer = tasks[1, 1, 1, 0]
    assert (transfer.start_ms, transfer.finish_ms) == (0.0, 8.0)
    assert tasks[1, 0, 0].start_ms == 0.0
    assert tasks[1, 0, 1].start_ms == 8.0
    assert (1, 1, 0, 0) not in tasks  # no transfer on one device


def test_transfers_of_different_layers_wait_for_their_common_channel() -> None:
    """Part 1 sends to part 2 twice: into the second layer from 0 to 4 ms, then into the third."""
    n = 2**14  # 64 samples of it are 2^22 bytes, 4 ms between nodes
    layers = [
        Layer(name="flat", kind=FLATTEN, n_in=n, n_out=n),
        Layer(name="flat2", kind=FLATTEN, n_in=n, n_out=n),
        Layer(name="linear1", kind=LINEAR, n_in=n, n_out=4, n_weights=4 * n),
    ]
    problem = LayerProblem(Machine(4, 1), layers)
    plan = (LayerCut(2, 1, (0, 1)), LayerCut(4, 1, (0, 0, 2, 2)), LayerCut(1, 4, (0, 1, 3, 3)))
    tasks = {task.order: task for task in simulate(problem, plan)}
    first, second, free = tasks[1, 1, 2, 1], tasks[2, 1, 2, 1], tasks[2, 1, 1, 1]
    assert first.resource == second.resource == (1, 2)
    assert (first.start_ms, first.finish_ms) == (0.0, 4.0)
    assert (second.ready_ms, second.start_ms, second.finish_ms) == (0.0, 4.0, 8.0)
    assert (free.resource, free.start_ms) == ((1, 1), 0.0)
    assert compiled_step_ms(problem, plan) == step_ms(problem, plan)


def test_synchronisation_of_slices_by_hand() -> None:
    """2 nodes x 2; a 4 x 1 linear layer on devices 0, 0, 1, 2: every slice is on all three."""
    layer = Layer(name="l", kind=LINEAR, n_in=2**10, n_out=2**10, n_weights=2**20)
    problem = LayerProblem(Machine(2, 2), [layer])
    transfer_ms, squared_parts = synchronise(problem, (LayerCut(4, 1, (0, 0, 1, 2)),))
    # 4 slices of 2^20 bytes: 1/4 ms inside (two devices of node 0), 1 ms between (two nodes)
    assert transfer_ms == 4 * (0.25 + 1.0)
    assert squared_parts == 4 * (2**2 + 1 + 1)
    transfer_ms, squared_parts = synchronise(problem, (LayerCut(2, 2, (0, 1, 0, 3)),))
    # block 0 (slices 0, 1) only on device 0; block 1 on devices 1 and 3, one in each node
    assert transfer_ms == 2 * 1.0
    assert squared_parts == 2 * 2**2 + 2 * (1 + 1)


def compiled_step_ms(problem: LayerProblem, plan: Plan) -> float:
    tables = build_tables(problem)
    encoded = encode(plan, problem.machine.n_devices)
    assert decode(tables, encoded) == plan
    return simulate_arrays(tables, encoded, math.inf)


def random_plan(problem: LayerProblem, rng: random.Random) -> Plan:
    """A standard plan with a few layers, or single parts, put anywhere."""
    n = problem.machine.n_devices
    plan = list(rng.choice([problem.data_parallel(), problem.linear_by_feature()]))
    for _ in range(rng.choice([1, 1, 2, 3, 12])):
        i = rng.randrange(len(plan))
        n_samples, n_features = rng.choice(problem.choices(problem.layers[i]))
        devices = [rng.randrange(n) for _ in range(n_samples * n_features)]
        if rng.random() < 0.5:
            n_samples, n_features = plan[i].n_samples, plan[i].n_features
            devices = list(plan[i].devices)
            devices[rng.randrange(len(devices))] = rng.randrange(n)
        plan[i] = LayerCut(n_samples, n_features, tuple(devices))
    return tuple(plan)


def test_kernels_equal_plain_python_exactly() -> None:
    rng = random.Random(7)
    for n_nodes, n_devices in [(1, 1), (1, 2), (1, 4), (2, 4), (4, 1), (4, 4)]:
        problem = LayerProblem(Machine(n_nodes, n_devices))
        for _ in range(120):
            plan = random_plan(problem, rng)
            assert compiled_step_ms(problem, plan) == step_ms(problem, plan), plan


def test_a_limit_refuses_slower_plans_only() -> None:
    rng = random.Random(8)
    problem = LayerProblem(Machine(2, 4))
    tables, found = build_tables(problem), set()
    for _ in range(200):
        plan = random_plan(problem, rng)
        cost_ms, encoded = step_ms(problem, plan), encode(plan, 8)
        assert simulate_arrays(tables, encoded, cost_ms) == cost_ms
        below_ms = simulate_arrays(tables, encoded, 0.9 * cost_ms)
        assert below_ms in (math.inf, cost_ms)
        found.add(below_ms == math.inf)
    assert True in found

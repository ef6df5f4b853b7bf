"""The 2018 cost model: published figures, and steps worked out by hand."""

import math

import numpy as np
import pytest

from harness.plan.published.flexflow2018.chain import new_chain, propose
from harness.plan.published.flexflow2018.model import (
    FLATTEN,
    LINEAR,
    POOL,
    Layer,
    LayerCut,
    LayerProblem,
    Machine,
    alexnet,
    part_ms,
)
from harness.plan.published.flexflow2018.simulation import (
    build_tables,
    decode,
    encode,
    simulate,
    step_ms,
)


@pytest.mark.parametrize(
    ("n_nodes", "n_devices", "printed"),
    [(1, 2, "102.147"), (1, 4, "218.664"), (2, 4, "451.692"), (4, 4, "917.718")],
)
def test_data_parallel_costs_the_published_step(n_nodes, n_devices, printed):
    problem = LayerProblem(Machine(n_nodes, n_devices))
    assert f"{step_ms(problem, problem.data_parallel()):.3f}" == printed


def test_alexnet_has_the_sizes_of_the_text():
    sizes = {layer.name: (layer.n_in, layer.n_out) for layer in alexnet()}
    assert sizes["conv1"] == (3 * 224**2, 64 * 55**2)
    assert sizes["pool2"] == (64 * 55**2, 64 * 27**2)
    assert sizes["pool8"] == (256 * 13**2, 256 * 6**2)
    assert sizes["linear9"] == (9216, 4096)
    assert sizes["linear11"] == (4096, 1000)
    assert alexnet()[-1].has_softmax


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

"""PipeTransformer's rule: stages by size, and half as many once the largest is small enough."""

import pytest
from made_graphs import replicated_pipeline

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.errors import StrategyError
from harness.plan.autopipe import AutoPipe
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator

N_LAYERS, N_DEVICES, BATCH = 12, 8, 64


def layers():
    """Equal residual layers of a million parameters: a norm, a product and an addition each."""
    made = [Operator(name="x", kind="input", shape={"sample": BATCH, "feature": 4})]
    for i in range(N_LAYERS):
        source = made[-1].name
        for name, kind, inputs, n_bytes in (
            (f"norm{i}", "layer_norm", [source], 0),
            (f"linear{i}", "linear", [f"norm{i}"], 4_000_000),
            (f"add{i}", "add", [source, f"linear{i}"], 0),
        ):
            made.append(
                Operator(
                    name=name, kind=kind, inputs=inputs, parameter_bytes=n_bytes,
                    shape={"sample": BATCH, "feature": 4}, activation_bytes=16 * BATCH,
                )
            )  # fmt: skip
    return Graph(name="layers", operators=made, batch=BATCH)


def first_of(kind, n):
    return [f"{part}{i}" for i in range(n) for part in kind]


def simulator_of(n_frozen):
    graph = layers()
    rates = {"device": DeviceRates(flops_per_s=1e9, memory_bytes_per_s=1e9)}
    profile = roofline_profile(graph, rates, n_parts=range(1, 9), n_microbatches=(1, 2, 4, 8))
    cluster = Cluster.uniform(1, N_DEVICES, inside_bytes_per_s=1e9, memory_bytes=1 << 40)
    frozen = frozenset(first_of(("norm", "linear", "add"), n_frozen))
    return Simulator(graph, profile, cluster, options=SimulatorOptions(frozen=frozen))


def pipeline_of(devices):
    return replicated_pipeline(layers(), BATCH, devices, n_microbatches=8, schedule="gpipe")


@pytest.mark.parametrize(
    ("n_frozen", "replicates", "devices", "n_layers"),
    [
        # A stage takes layers while it stays below the mean of those left, the last one the rest.
        (0, True, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)], [1, 1, 1, 1, 1, 2, 2, 3]),
        # On half as many stages 4/6 + 1, 2, 2 and 3 layers, again 3 at most; then 4/6 + 3 and 5.
        (4, True, [(0, 1), (2, 3), (4, 5), (6, 7)], [5, 2, 2, 3]),
        (9, True, [(0, 1, 2, 3), (4, 5, 6, 7)], [9, 3]),
        (11, True, [(0, 1, 2, 3, 4, 5, 6, 7)], [12]),
        (4, False, [(0,), (1,), (2,), (3,)], [5, 2, 2, 3]),
    ],
)
def test_the_pipeline_halves_while_the_largest_stage_fits(n_frozen, replicates, devices, n_layers):
    rule = AutoPipe(pipeline_of([[d] for d in range(8)]), replicates=replicates)
    found = rule.next_strategy(simulator_of(n_frozen))
    assert found.stage_devices() == devices
    linears = [plan.stage for name, plan in found.operators.items() if name.startswith("linear")]
    assert [linears.count(stage) for stage in range(len(devices))] == n_layers


def test_only_pipelines_of_equal_stages_shrink():
    with pytest.raises(StrategyError, match=r"stages on \(0,\), \(1, 2\): start with"):
        AutoPipe(pipeline_of([[0], [1, 2]]), replicates=True)
    with pytest.raises(StrategyError, match="--strategy pipeline, not interleaved"):
        AutoPipe(pipeline_of([[0], [1], [0], [1]]), replicates=True)

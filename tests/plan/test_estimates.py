"""Times by a roofline, and the graph of a DLRM by its sizes."""

from dataclasses import replace

import pytest

from harness.domain.cluster import Cluster
from harness.errors import GraphError, PlanError
from harness.plan.costs import PlanRequest
from harness.plan.estimates import (
    DeviceRates,
    DlrmSizes,
    dlrm_graph,
    likely_parts,
    operator_seconds,
    roofline_profile,
)
from harness.plan.fit import OperatorTimes
from harness.plan.formats.flexflow import parse_console, strategy_from_entries
from harness.plan.portfolio import search_portfolio
from harness.plan.simulate.options import SimulatorOptions

P100 = DeviceRates(flops_per_s=9.3e12, memory_bytes_per_s=549e9)


def test_roofline_takes_the_longer_of_flops_and_bytes():
    rates = DeviceRates(flops_per_s=100.0, memory_bytes_per_s=10.0, launch_s=1.0)
    assert rates.seconds(1000, 10) == 11.0
    assert rates.seconds(10, 1000) == 101.0
    with pytest.raises(PlanError, match="must be above 0"):
        DeviceRates(flops_per_s=0, memory_bytes_per_s=1)


def test_a_roofline_for_many_devices_is_short_and_right_between_its_points():
    graph = dlrm_graph(DlrmSizes())
    profile = roofline_profile(graph, {"P100": P100}, n_parts=likely_parts(512))
    assert len(profile.measurements) < 10_000
    linear = next(op for op in graph.operators if op.name == "top1")
    shape = {"sample": 1024 // 48, "feature": 1024}
    times = OperatorTimes(profile)
    assert not times.is_measured(linear, "P100", shape)
    found = times.lookup(linear, "P100", shape=shape)
    wanted = operator_seconds(linear, 4 * 1024 * 1024, shape, P100)
    # Between two points it is a straight line but where FLOPs begin to take longer than bytes.
    assert (found.forward_s, found.backward_s) == pytest.approx(wanted, rel=0.02)


def test_a_frozen_prefix_has_no_backward_and_frozen_weights_no_gradient_to_write():
    graph = dlrm_graph(DlrmSizes(bottom=(4, 64), top=(64 * 9, 64, 1)))
    rates = DeviceRates(flops_per_s=1e30, memory_bytes_per_s=1.0, launch_s=0.0)
    trained = roofline_profile(graph, {"P100": rates}, n_parts=[1])
    for operator in graph.operators:
        if operator.name != "top0":
            operator.attrs["frozen_bytes"] = operator.parameter_bytes
    frozen = roofline_profile(graph, {"P100": rates}, n_parts=[1])
    assert [point.forward_s for point in frozen.measurements] == [
        point.forward_s for point in trained.measurements
    ]
    less_s = {
        before.operator: before.backward_s - after.backward_s
        for before, after in zip(trained.measurements, frozen.measurements, strict=True)
        if after.backward_s
    }
    last = graph.operators[graph.index()["top1"]]
    assert less_s.pop(last.profile_key) == last.parameter_bytes
    assert less_s
    assert set(less_s.values()) == {0}


@pytest.mark.parametrize(("optimizer", "n_accesses"), [("sgd", 3), ("momentum", 5), ("adamw", 7)])
def test_the_optimizer_reads_and_writes_at_the_memory_rate(optimizer, n_accesses):
    profile = roofline_profile(dlrm_graph(DlrmSizes()), {"P100": P100}, n_parts=[1])
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=10**9, kind="P100")
    found = SimulatorOptions().with_optimizer(optimizer, profile, cluster)
    assert found.optimizer_s_per_byte == pytest.approx([n_accesses / 549e9] * 2)
    assert found.stream_s_per_byte == pytest.approx([1 / 549e9] * 2)


def test_the_graph_has_the_flags_sizes():
    graph = dlrm_graph(DlrmSizes())
    kinds = [op.kind for op in graph.operators]
    assert (kinds.count("linear"), kinds.count("embedding"), kinds.count("cat")) == (7, 8, 1)
    tables = 8 * 1_000_000 * 64 * 4
    mlp = 4 * (65 * 512 + 513 * 512 + 513 * 64 + 577 * 1024 + 2 * 1025 * 1024 + 1025)
    assert graph.parameter_bytes == tables + mlp
    top = next(op for op in graph.operators if op.name == "top0")
    assert top.forward_flops == 2 * 1024 * 576 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 32}, "takes 576 features.*make 320"),
        ({"rows": 0}, "must be >= 1"),
        ({"bottom": (64,)}, "need an input and an output width"),
    ],
)
def test_flags_that_disagree_are_refused(changes, message):
    with pytest.raises(GraphError, match=message):
        DlrmSizes(**changes)


def small_request():
    flags = DlrmSizes(n_tables=8, rows=1_000_000, batch=1024)
    graph = dlrm_graph(flags)
    profile = roofline_profile(
        graph, {"P100": P100}, n_parts=range(1, 5), n_microbatches=(1, 2, 4, 8, 16)
    )
    cluster = Cluster.uniform(
        1, 4, inside_bytes_per_s=12e9, memory_bytes=12 * 10**9, kind="P100", latency_s=1e-5
    )
    return PlanRequest(graph=graph, profile=profile, cluster=cluster, batch=1024, budget=200)


def test_search_is_at_least_as_fast_as_tables_on_devices_and_far_from_data_parallel():
    options = SimulatorOptions(optimizer_s_per_byte=3 / 549e9)
    found = search_portfolio(small_request(), options=options).result()
    tables = next(r for r in found.runners_up if r.name == "tables on devices")
    assert found.predicted_step_s <= tables.step_s
    # 2 GB of table gradients cross 12 GB/s links in data parallel; none here.
    assert found.speedup_over_ddp > 20
    embeddings = [p for name, p in found.strategy.operators.items() if name.startswith("table")]
    assert not any("sample" in plan.partition for plan in embeddings)


def test_flexflows_lines_of_the_same_model_can_be_a_start():
    lines = [f"[Dense_{k}] num_dims(2) dims[1,4] device_ids[0,1,2,3]" for k in range(7)]
    lines += [f"[Embedding_{k}] num_dims(2) dims[1,1] device_ids[{k % 4}]" for k in range(8)]
    lines.append("[Concat-1] num_dims(2) dims[1,4] device_ids[0,1,2,3]")
    request = small_request()
    start = strategy_from_entries(parse_console("\n".join(lines)), request.graph, batch=1024)
    found = search_portfolio(replace(request, start=start, budget=1)).result()
    assert f"start: {start.name}" in {r.name for r in found.runners_up} | {found.method}

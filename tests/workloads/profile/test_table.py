"""What the table of a profile says beside its numbers."""

import pytest
from made_graphs import profile_by_keys
from msgspec.structs import replace

from harness.domain.profile import WholeStep
from harness.runtime.capture.capture import capture_model
from harness.workloads.profile.table import _loose_fits, _order_advice, _sums


def profiled(graph, steps, dtype="float32"):
    """Each operator in 2 ms, and whole steps as (batch, seconds, seconds of operators)."""
    whole = [
        WholeStep(
            device_kind="gpu", batch=batch, dtype=dtype, step_s=step_s, operators_s=operators_s,
            graph_hash=graph.content_hash(), is_queued=True,
        )
        for batch, step_s, operators_s in steps
    ]  # fmt: skip
    return replace(profile_by_keys(graph, (0.001, 0.001), "gpu", dtype), whole_steps=whole)


def test_a_gpu_that_waits_for_its_host_is_named_with_the_batch_at_which_it_stops():
    graph = capture_model("lenet", 32)
    profile = profiled(graph, [(32, 0.04, 0.04), (4, 0.025, 0.005)])
    *_, last = _sums(profile, graph, {"gpu"}).splitlines()
    assert last == (
        "gpu: its host queues a step in 25 ms, so any batch below about 20 samples takes as long: "
        "use larger microbatches"
    )


def test_the_worst_of_fits_that_err_by_more_than_half_are_named():
    graph = capture_model("lenet", 32)
    keys = list(dict.fromkeys(op.profile_key for op in graph.operators))[:3]
    errors = dict(zip(keys, (0.2, 1.92, 9.05), strict=True))
    names = [next(op.name for op in graph.operators if op.profile_key == key) for key in keys]
    (line,) = _loose_fits("cpu", errors, graph)
    assert line == (
        "warning: cpu: the fits of 2 of 3 operators err by over 50% "
        f"(most: {names[2]} 905%, {names[1]} 192%): delete the profile, and run it again on idle "
        "devices with more --min-samples or --rounds"
    )
    assert _loose_fits("cpu", {keys[0]: 0.5}, graph) == []


@pytest.mark.parametrize(
    ("model", "dtype", "is_advised"),
    [("alexnet", "bfloat16", True), ("alexnet", "float32", False), ("dlrm", "bfloat16", False)],
)
def test_channels_last_order_is_advised_where_gpus_compute_images(model, dtype, is_advised):
    graph = capture_model(model, 2)
    advice = _order_advice(profiled(graph, [(2, 0.04, 0.04)], dtype), graph)
    assert ("try --channels-last" in advice) == is_advised

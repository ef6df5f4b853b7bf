"""What the table of a profile says beside its numbers."""

from harness.domain.profile import Measurement, Profile, WholeStep
from harness.domain.sharding import has_tasks
from harness.runtime.capture.capture import capture_model
from harness.workloads.profile.table import _sums


def test_a_gpu_that_waits_for_its_host_is_named_with_the_batch_at_which_it_stops():
    graph = capture_model("lenet", 32)
    points = {
        operator.profile_key: Measurement(
            device_kind="gpu", operator=operator.profile_key, shape=operator.shape,
            dtype="float32", forward_s=0.001, backward_s=0.001,
        )
        for operator in filter(has_tasks, graph.operators)
    }  # fmt: skip
    steps = [
        WholeStep(
            device_kind="gpu", batch=batch, dtype="float32", step_s=step_s, operators_s=operators_s,
            graph_hash=graph.content_hash(), is_queued=True,
        )
        for batch, step_s, operators_s in ((32, 0.04, 0.04), (4, 0.025, 0.005))
    ]  # fmt: skip
    profile = Profile(model="lenet", measurements=list(points.values()), whole_steps=steps)
    *_, last = _sums(profile, graph, {"gpu"}).splitlines()
    assert last == (
        "gpu: its host queues a step in 25 ms, so any batch below about 20 samples takes as long: "
        "use larger microbatches"
    )

import pytest

from harness.errors import PlanError
from harness.plan.dlrm import DlrmSizes, dlrm_graph
from harness.plan.fit import OperatorTimes
from harness.plan.roofline import DeviceRates, likely_parts, operator_seconds, roofline_profile

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

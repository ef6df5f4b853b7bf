import msgspec
import pytest

from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.errors import PlanError
from harness.plan.fit import OperatorTimes, fit_line
from harness.plan.published.pipedream.problem import TICK_S, workload_from

CONV = Operator(name="conv1", kind="conv2d", shape={"sample": 8, "feature": 4}, signature="conv")


def profile(*points):
    return Profile(
        model="m",
        measurements=[
            Measurement(device_kind="gpu", operator="conv", shape=shape, forward_s=f, backward_s=b)
            for shape, f, b in points
        ],
    )


def test_measured_shape_is_exact():
    times = OperatorTimes(profile(({"sample": 8, "feature": 4}, 1.0, 3.0)))
    found = times.lookup(CONV, "gpu")
    assert found == (1.0, 3.0)
    assert found.total_s == 4.0


def test_between_shapes_a_line_is_fitted():
    times = OperatorTimes(
        profile(
            ({"sample": 8, "feature": 4}, 0.5 + 32 * 0.25, 32.0),
            ({"sample": 2, "feature": 4}, 0.5 + 8 * 0.25, 8.0),
        )
    )
    found = times.lookup(CONV, "gpu", shape={"sample": 4, "feature": 4})
    assert found.forward_s == pytest.approx(0.5 + 16 * 0.25)
    assert found.backward_s == pytest.approx(16.0)
    assert times.relative_error(CONV, "gpu", "float32") == pytest.approx(0.0, abs=1e-9)


LINEAR = Operator(
    name="fc",
    kind="linear",
    shape={"sample": 8, "feature": 4},
    parameter_bytes=4 * 4 * 6,
    signature="conv",
    attrs={"in_features": 6, "out_features": 4},
)


def test_a_cut_of_the_batch_tells_nothing_of_a_cut_of_the_weights():
    # Half of the samples take 0.9 of the time, half of the weights take half of it.
    times = OperatorTimes(
        profile(
            ({"sample": 8, "feature": 4}, 10.0, 20.0),
            ({"sample": 4, "feature": 4}, 9.0, 18.0),
            ({"sample": 8, "feature": 2}, 5.0, 10.0),
        )
    )
    few = times.lookup(LINEAR, "gpu", shape={"sample": 6, "feature": 4})
    assert (few.forward_s, few.backward_s) == pytest.approx((9.5, 19.0))
    both = times.lookup(LINEAR, "gpu", shape={"sample": 4, "feature": 2})
    assert (both.forward_s, both.backward_s) == pytest.approx((4.5, 9.0))


def test_between_measurements_the_nearest_two_decide():
    points = [({"sample": n, "feature": 4}, s, s) for n, s in ((1, 1.0), (2, 8.0), (8, 8.0))]
    times = OperatorTimes(profile(*points))
    assert times.lookup(CONV, "gpu", shape={"sample": 5, "feature": 4}).forward_s == 8.0
    # Without the point at 2, the line from 1 to 8 would be at 2.
    assert times.relative_error(CONV, "gpu", "float32") == pytest.approx(0.75)


def test_a_line_has_the_least_relative_squares():
    # Least relative squares of one slope through (1, 1) and (2, 4): the line cannot hold both.
    line = fit_line([1.0, 2.0], [1.0, 4.0])
    assert line.fixed_s == 0.0
    assert line.slope_s == pytest.approx(1.2)  # (1 + 1/2) / (1 + 1/4)


def test_time_of_the_whole_scales_to_a_part_of_the_contraction():
    times = OperatorTimes(profile(({}, 1.0, 2.0)))
    shape = {"sample": 8, "feature": 4, "contraction": 3}
    linear = msgspec.structs.replace(LINEAR, inputs=["x"])
    assert times.lookup(linear, "gpu", shape=shape).backward_s == 1.0


def test_a_loss_of_some_classes_takes_its_share_of_the_whole():
    loss = Operator(name="loss", kind="loss", shape={"sample": 8}, attrs={"n_classes": 100})
    wholes = [({"sample": n}, 1.0 * n, 2.0 * n) for n in (2, 4, 8)]
    points = [msgspec.structs.replace(p, operator="loss") for p in profile(*wholes).measurements]
    times = OperatorTimes(Profile(model="m", measurements=points))
    assert times.lookup(loss, "gpu", shape={"sample": 8, "contraction": 25}).total_s == 6.0
    assert times.lookup(loss, "gpu", shape={"sample": 6}).total_s == pytest.approx(18.0)


def test_the_only_dtype_of_a_profile_stands_for_any():
    whole = profile(({"sample": 8, "feature": 4}, 1.0, 3.0))
    half = [msgspec.structs.replace(point, dtype="bfloat16") for point in whole.measurements]
    times = OperatorTimes(msgspec.structs.replace(whole, measurements=half))
    assert times.lookup(CONV, "gpu").total_s == 4.0
    assert times.is_measured(CONV, "gpu", CONV.shape)
    double = [msgspec.structs.replace(point, forward_s=2.0, dtype="float32") for point in half]
    times = OperatorTimes(msgspec.structs.replace(whole, measurements=half + double))
    assert times.lookup(CONV, "gpu").total_s == 5.0
    graph = Graph(name="m", operators=[CONV])
    only = msgspec.structs.replace(whole, measurements=half)
    assert workload_from(graph, only, "gpu").compute_ticks == [round(4.0 / TICK_S)]


def test_an_unknown_operator_or_device_kind_is_named():
    times = OperatorTimes(profile(({}, 1.0, 2.0)))
    with pytest.raises(PlanError, match="does not know operator 'fc'"):
        times.lookup(Operator(name="fc", kind="linear"), "gpu")
    with pytest.raises(PlanError, match="no device kind 'cpu', only 'gpu'"):
        times.lookup(CONV, "cpu")


def jittered(spread):
    """Seconds of 1 ms a sample, but for one size that was caught in a slow moment."""
    seconds = {1: 1.0, 2: 2.0, 3: 3.9, 4: 4.0, 6: 6.0, 8: 8.0}
    points = [
        Measurement(
            device_kind="gpu", operator="conv", shape={"sample": n, "feature": 4}, forward_s=s,
            backward_s=2 * s, spread=spread, n_samples=9,
        )
        for n, s in seconds.items()
    ]  # fmt: skip
    return Profile(model="m", measurements=points)


def at_three(profile):
    found = OperatorTimes(profile).lookup(CONV, "gpu", shape={"sample": 3, "feature": 4})
    assert found.backward_s == pytest.approx(2 * found.forward_s)
    return found.forward_s


def test_a_steady_measurement_is_believed_whatever_the_others_say():
    assert at_three(jittered(0.001)) == pytest.approx(3.9, rel=1e-3)


def test_the_more_samples_jitter_the_more_their_neighbours_count():
    believed = [at_three(jittered(spread)) for spread in (0.05, 0.2, 0.5)]
    assert 3.9 > believed[0] > believed[1] > believed[2]
    # All of the difference is noise: what is left is the line, itself pulled up by the slow one.
    assert believed[2] == pytest.approx(3.0, rel=0.06)


def test_noise_is_that_of_the_median_of_so_many_samples():
    def noise(n):
        return Measurement(
            device_kind="gpu", operator="conv", forward_s=1.0, backward_s=1.0, spread=0.1,
            n_samples=n,
        ).relative_noise  # fmt: skip

    # Quartiles 1.349 deviations apart, the median's error sqrt(pi / 2 n) of one.
    assert noise(10_000) == pytest.approx(0.1 / 1.349 * 0.0125331, rel=1e-3)
    # Of three samples the quartiles are 0.845 deviations apart.
    assert noise(3) == pytest.approx(0.1 / 0.845 * 0.7236, rel=2e-3)
    assert noise(1) == 0.0

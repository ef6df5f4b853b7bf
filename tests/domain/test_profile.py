import msgspec
import pytest

from harness.domain.profile import Measurement, Profile, WholeStep
from harness.errors import GraphError


def point(**fields):
    values: dict[str, object] = {
        "device_kind": "gpu",
        "operator": "conv",
        "forward_s": 1.0,
        "backward_s": 2.0,
    }
    return Measurement(**{**values, **fields})  # type: ignore[arg-type]


def test_hash_is_of_the_measurements():
    a = Profile(model="m", measurements=[point()], provenance={"host": "a"})
    b = Profile(model="m", measurements=[point()], provenance={"host": "b"})
    c = Profile(model="m", measurements=[point(forward_s=1.5)])
    assert a.content_hash() == b.content_hash() != c.content_hash()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward_s": -1.0}, "'conv' on 'gpu' has forward_s -1.0: a time must be >= 0"),
        ({"backward_s": float("inf")}, "has backward_s inf"),
        ({"saved_bytes": -1}, "saved_bytes -1"),
        ({"shape": {"sample": 0}}, "sizes must be >= 1"),
    ],
)
def test_impossible_measurement_is_refused(fields, message):
    with pytest.raises(GraphError, match=message):
        point(**fields)


def test_negative_time_in_a_file_is_refused_with_the_file():
    data = msgspec.json.decode(Profile(model="m", measurements=[point()]).to_json())
    data["measurements"][0]["forward_s"] = -0.5
    with pytest.raises(GraphError, match=r"times\.json.*forward_s -0.5"):
        Profile.from_json(msgspec.json.encode(data), source="times.json")


def test_point_measured_twice_is_refused():
    with pytest.raises(GraphError, match="measures operator 'conv' twice"):
        Profile(model="m", measurements=[point(), point(forward_s=3.0)])


def step(**fields):
    values: dict[str, object] = {
        "device_kind": "gpu",
        "batch": 4,
        "dtype": "float32",
        "step_s": 1.0,
        "operators_s": 1.0,
    }
    return WholeStep(**{**values, **fields})  # type: ignore[arg-type]


def test_each_dtype_has_its_own_calibration():
    steps = [step(step_s=2.0), step(dtype="bfloat16", step_s=3.0)]
    profile = Profile(model="m", measurements=[point()], whole_steps=steps)
    assert profile.calibration_of("", "gpu", 4, "float32").factor == 2.0
    assert profile.calibration_of("", "gpu", 4, "bfloat16").factor == 3.0
    assert profile.calibration_of("", "gpu", 4, "float16") == (1.0, 0.0)


def test_calibration_lies_between_that_of_two_batches():
    steps = [step(step_s=2.0, operators_s=1.6), step(batch=1, step_s=3.0)]
    profile = Profile(model="m", measurements=[point()], whole_steps=steps)
    found = [profile.calibration_of("", "gpu", samples).factor for samples in (1, 2, 4, 8)]
    assert found == pytest.approx([3.0, (3.0 + 1.25) / 2, 1.25, 1.25])
    assert profile.calibration_of("another graph", "gpu", 4) == (1.0, 0.0)
    assert profile.calibrations("") == {"gpu, 4 samples": 1.25, "gpu, 1 samples": 3.0}


def test_a_gpu_waits_for_its_host_as_long_in_any_batch():
    steps = [
        step(batch=16, step_s=16.8, operators_s=16.0, is_queued=True),
        step(batch=2, step_s=6.0, operators_s=2.0, is_queued=True),
    ]
    profile = Profile(model="m", measurements=[point()], whole_steps=steps)
    for samples in (1, 2, 8, 16, 32):
        assert profile.calibration_of("", "gpu", samples) == (1.05, 6.0)
    steps[1] = msgspec.structs.replace(steps[1], step_s=2.2)  # the host is ahead
    profile = msgspec.structs.replace(profile, whole_steps=steps)
    assert profile.calibration_of("", "gpu", 1) == (1.1, 0.0)
    assert profile.calibration_of("", "gpu", 16) == (1.05, 0.0)

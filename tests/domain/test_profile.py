from __future__ import annotations

import msgspec
import pytest

from harness.domain.profile import Measurement, Profile, WholeStep
from harness.errors import GraphError


def point(**fields: object) -> Measurement:
    values: dict[str, object] = {
        "device_kind": "gpu",
        "operator": "conv",
        "forward_s": 1.0,
        "backward_s": 2.0,
    }
    return Measurement(**{**values, **fields})  # type: ignore[arg-type]


def test_json_round_trip_keeps_everything() -> None:
    profile = Profile(
        model="m",
        measurements=[point(shape={"sample": 4}, saved_bytes=10, spread=0.01), point()],
        whole_steps=[
            WholeStep(device_kind="gpu", batch=4, dtype="float32", step_s=2.0, operators_s=3.0)
        ],
        provenance={"host": "a"},
    )
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.whole_steps[0].ratio == 1.5


def test_hash_is_of_the_measurements() -> None:
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
def test_impossible_measurement_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        point(**fields)


def test_negative_time_in_a_file_is_refused_with_the_file() -> None:
    data = msgspec.json.decode(Profile(model="m", measurements=[point()]).to_json())
    data["measurements"][0]["forward_s"] = -0.5
    with pytest.raises(GraphError, match=r"times\.json.*forward_s -0.5"):
        Profile.from_json(msgspec.json.encode(data), source="times.json")


def test_point_measured_twice_is_refused() -> None:
    with pytest.raises(GraphError, match="measures operator 'conv' twice"):
        Profile(model="m", measurements=[point(), point(forward_s=3.0)])


def test_each_dtype_has_its_own_pace() -> None:
    steps = [
        WholeStep(
            device_kind="gpu", batch=4, dtype=dtype, step_s=1.0, operators_s=1.0, latest_s=pace
        )
        for dtype, pace in (("float32", 2.0), ("bfloat16", 3.0))
    ]
    profile = Profile(model="m", measurements=[point()], whole_steps=steps)
    assert profile.paces_of("", "gpu", 4, "float32") == (2.0, 2.0)
    assert profile.paces_of("", "gpu", 4, "bfloat16") == (3.0, 3.0)
    assert profile.paces_of("", "gpu", 4, "float16") == (1.0, 1.0)


def test_a_step_is_paced_by_what_its_operators_add_up_to() -> None:
    step = WholeStep(
        device_kind="gpu", batch=4, dtype="float32", step_s=2.0, operators_s=1.6, latest_s=3.0
    )
    profile = Profile(model="m", measurements=[point()], whole_steps=[step])
    assert profile.paces_of("", "gpu", 4) == pytest.approx((3.0 / 1.6, 3.0 / 1.6))
    assert profile.drift("", "gpu", 4) == 1.5


def test_each_pass_is_paced_by_its_own_share_of_the_step() -> None:
    step = WholeStep(
        device_kind="gpu", batch=4, dtype="float32", step_s=2.0, operators_s=2.0, latest_s=3.0,
        forward_share=0.4, operators_forward_share=0.3,
    )  # fmt: skip
    small = msgspec.structs.replace(step, batch=1, forward_share=0.3)
    profile = Profile(model="m", measurements=[point()], whole_steps=[step, small])
    forward, backward = profile.paces_of("", "gpu", 4)
    # Operators of 0.6 and 1.4 s are a step of 3 s, of which forward is 1.2.
    assert (0.6 * forward, 1.4 * backward) == pytest.approx((1.2, 1.8))
    assert profile.paces_of("", "gpu", 1) == pytest.approx((1.5, 1.5))
    assert profile.paces_of("", "gpu", 2) == pytest.approx(
        ((forward + 1.5) / 2, (backward + 1.5) / 2)
    )
    told = profile.paces("")
    assert told["gpu, 4 samples"] == 1.5
    assert told["gpu forward, 4 samples"] == forward
    assert told["gpu backward, 4 samples"] == backward


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_pass_is_a_part_of_the_step(share: float) -> None:
    with pytest.raises(GraphError, match=f"forward_share {share}: it must be between 0 and 1"):
        WholeStep(
            device_kind="gpu", batch=4, dtype="float32", step_s=2.0, operators_s=3.0,
            forward_share=share,
        )  # fmt: skip


def test_from_one_device_to_all_the_share_goes_in_proportion_to_the_others() -> None:
    step = WholeStep(
        device_kind="gpu", batch=4, dtype="float32", step_s=1.0, operators_s=1.0,
        alone_ratio=0.8, n_devices=5,
    )  # fmt: skip
    profile = Profile(model="m", measurements=[point()], whole_steps=[step])
    shares = [profile.share_of("", "gpu", 4, n_devices=n) for n in (1, 2, 3, 4, 5, 8)]
    assert shares == pytest.approx([0.8, 0.85, 0.9, 0.95, 1.0, 1.0])
    assert profile.share_of("", "cpu", 4, n_devices=1) == 1.0
    assert profile.share_of("", "gpu", 4, "bfloat16", n_devices=1) == 1.0
    assert profile.paces("") == {"gpu, 4 samples": 1.0, "gpu alone, 4 samples": 0.8}


def test_a_whole_step_has_samples() -> None:
    with pytest.raises(GraphError, match="'gpu' has batch 0: it must be >= 1"):
        WholeStep(device_kind="gpu", batch=0, dtype="float32", step_s=1.0, operators_s=1.0)


def test_a_whole_step_takes_time() -> None:
    with pytest.raises(GraphError, match=r"latest_s 0\.0: it must be above 0"):
        WholeStep(
            device_kind="gpu", batch=4, dtype="float32", step_s=2.0, operators_s=3.0, latest_s=0.0
        )

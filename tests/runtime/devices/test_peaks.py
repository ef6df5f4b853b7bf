"""Published peaks: exact names only, and no dtype without hardware."""

from harness.runtime.devices.peaks import highest_clock, peak_flops_per_s


def test_a_listed_gpu_has_its_dense_peaks() -> None:
    assert peak_flops_per_s("NVIDIA H200") == {
        "fp32": 66.9e12,
        "tf32": 494.7e12,
        "bf16": 989.4e12,
        "fp16": 989.4e12,
    }


def test_volta_has_no_bf16_and_no_tf32() -> None:
    assert set(peak_flops_per_s("Tesla V100-SXM2-16GB")) == {"fp32", "fp16"}


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops_per_s("NVIDIA A100") == {}
    assert peak_flops_per_s("AMD EPYC 9454") == {}


def test_only_boards_with_free_clocks_run_above_their_rating() -> None:
    for name in ("NVIDIA GeForce RTX 4090", "NVIDIA RTX A6000", "TITAN RTX", "Quadro RTX 8000"):
        assert highest_clock(name) == 1.25
    for name in ("NVIDIA H200", "Tesla T4", "NVIDIA A10"):
        assert highest_clock(name) == 1.0

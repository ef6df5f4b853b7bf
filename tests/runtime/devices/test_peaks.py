"""Published peaks: exact names only, and no dtype without hardware."""

import pytest

from harness.runtime.devices.peaks import highest_clock, peak_flops_per_s


def test_a_listed_gpu_has_its_dense_peaks():
    assert peak_flops_per_s("NVIDIA H200") == {
        "fp32": 66.9e12,
        "tf32": 494.7e12,
        "bf16": 989.4e12,
        "fp16": 989.4e12,
    }


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        ("Tesla P4", {"fp32"}),
        ("NVIDIA GeForce GTX 1070", {"fp32"}),
        ("GeForce GTX 1070", {"fp32"}),  # drivers before release 450
        ("Tesla T4", {"fp32", "fp16"}),
        ("NVIDIA GeForce RTX 2060 SUPER", {"fp32", "fp16"}),
        ("NVIDIA GeForce RTX 3050", {"fp32", "tf32", "bf16", "fp16"}),
        ("NVIDIA GeForce RTX 4090 D", {"fp32", "tf32", "bf16", "fp16"}),
        ("NVIDIA GeForce RTX 5070 Ti", {"fp32", "tf32", "bf16", "fp16"}),
        ("NVIDIA A10G", {"fp32", "tf32", "bf16", "fp16"}),
        ("NVIDIA L4", {"fp32", "tf32", "bf16", "fp16"}),
    ],
)
def test_cards_of_small_clusters_have_peaks(kind, dtypes):
    assert set(peak_flops_per_s(kind)) == dtypes


def test_only_boards_with_free_clocks_run_above_their_rating():
    for name in ("NVIDIA GeForce RTX 4090", "NVIDIA RTX A6000", "TITAN RTX", "Quadro RTX 8000"):
        assert highest_clock(name) == 1.25
    for name in ("NVIDIA H200", "Tesla T4", "NVIDIA A10"):
        assert highest_clock(name) == 1.0

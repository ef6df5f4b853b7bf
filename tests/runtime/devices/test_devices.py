"""Peaks, clocks, memory and meters of a device."""

from __future__ import annotations

import sys

import pytest
import torch
from fake_clock import FakeClock
from launching import completed

from harness.errors import ConfigError
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.devices.peaks import highest_clock, peak_flops_per_s
from harness.runtime.devices.precision import set_tensor_cores
from harness.runtime.devices.sampling import Budget, clock_for, count_within, take_samples
from harness.runtime.devices.telemetry import _cpu_reader, read_available


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


DEVICE = torch.device("cuda", 1)


class Event:
    """Stands in for a CUDA event."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.stream = stream


@pytest.fixture
def settled(monkeypatch):
    """The devices that were waited for."""
    found = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_a_gpu_without_hardware_for_a_dtype_is_named(dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P4")
    wanted = rf"--dtype {dtype} needs compute capability 8.0, this GPU has 6.1 \(Tesla P4\): use"
    with pytest.raises(ConfigError, match=wanted):
        set_tensor_cores(dtype, torch.device("cuda:0"))


def test_a_mark_is_of_the_clocks_own_device(settled):
    clock = clock_for(DEVICE)
    assert clock.mark().stream == "stream of cuda:1"
    clock.settle()
    assert settled == [DEVICE, DEVICE]


@pytest.mark.parametrize(
    ("sample_s", "expected"), [(0.1, 10), (0.3, 4), (2.0, 3), (1e-6, 50), (0.0, 50)]
)
def test_a_budget_holds_between_its_least_and_most(sample_s, expected):
    assert Budget(time_s=1.0, n_min=3, n_max=50).count(sample_s) == expected


def test_samples_are_durations_after_the_warm_up():
    clock = FakeClock()
    calls: list[float] = []

    def sample():
        calls.append(1.0 if len(calls) < 2 else 0.25)
        start = clock.mark()
        clock.advance(calls[-1])
        return start, clock.mark()

    found = take_samples(sample, clock, Budget(time_s=1.0, n_min=2, n_warm_up=2))
    assert found == [0.25] * 4
    assert len(calls) == 6


@pytest.mark.parametrize(("least_s", "n_calls"), [(0.0, 1), (0.1, 41)])
def test_a_pause_in_one_call_hardly_lowers_the_number_of_calls_in_a_sample(least_s, n_calls):
    clock, calls_s = FakeClock(), iter([0.0, 0.06, *[0.001] * 99])
    assert count_within(lambda: clock.advance(next(calls_s)), clock, least_s) == n_calls


_PROGRAM = """
import resource, torch
from harness.runtime.devices.memory import keep_freed_memory, return_freed_memory
def n_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for is_kept in (False, True):
    if is_kept:
        keep_freed_memory(torch.device("cpu"))
    for round in range(30):
        if round == 20:  # the heap has grown until both blocks find a hole
            before = n_faults()
        pair = [torch.ones(40 << 18), torch.ones(40 << 18)]  # above what glibc keeps by itself
        del pair
    print(n_faults() - before)
def rss_pages():
    return int(open("/proc/self/statm").read().split()[1])
before = rss_pages()
return_freed_memory()
print(before - rss_pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_not_fetched_again_page_by_page():
    done = completed(sys.executable, "-c", _PROGRAM)
    freed, kept, returned = map(int, done.stdout.split())
    assert freed > 1000  # of 204800 pages
    assert kept < 100
    assert returned > 10_000  # of at least 20480


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_libraries_that_find_no_room_have_run_out_of_memory(error, is_it):
    assert is_out_of_memory(error) == is_it


def test_a_tensor_that_is_too_large_has_run_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)


class Refusal(Exception):
    """What a driver raises for a meter that the card does not have."""


def refuse():
    raise Refusal("not supported")


def test_a_meter_that_a_card_lacks_leaves_the_others():
    readings = {"power_w": refuse, "device_temperature_c": lambda: 40}
    assert read_available(readings, Refusal) == {"device_temperature_c": 40.0}


def test_load_is_a_share_of_the_cores_that_a_rank_may_use(monkeypatch):
    monkeypatch.setattr("psutil.Process.cpu_percent", lambda self: 18.0)
    assert _cpu_reader(0.36)()["device_utilization_percent"] == pytest.approx(50)

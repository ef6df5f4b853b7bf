"""Memory of a GPU or CPU and its last-level cache."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path

import torch
from torch import nn

from harness.errors import ConfigError
from harness.measure.peak_rss import peak_rss_bytes
from harness.measure.recorder import Recorder
from harness.units import parse_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_LARGEST_INT = 2**31 - 1
# Largest block that is kept; the second bound is for glibc versions that refuse the first.
_KEPT_BYTES = (1 << 30, 32 << 20)

# Error messages of the CPU allocator, CUDA, NCCL, and libraries that allocate workspaces.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def keep_freed_memory(device: torch.device) -> None:
    """Make malloc keep the memory of freed CPU tensors, as GPU allocators do.

    glibc may return large blocks to the system, depending on their neighbours, and then page them
    in again; that took half of the backward pass of a convolution of 512 by 512 channels in some
    runs and nothing in others. Does nothing without glibc, or if malloc's variables are set.
    """
    if device.type != "cpu" or any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    with contextlib.suppress(OSError, AttributeError):
        adjust = ctypes.CDLL(None).mallopt
        adjust(_M_TRIM_THRESHOLD, _LARGEST_INT)
        for n_bytes in _KEPT_BYTES:
            if adjust(_M_MMAP_THRESHOLD, n_bytes):
                break


def return_freed_memory() -> None:
    """Give the freed memory of this process to the processes of later runs."""
    torch.cuda.empty_cache()  # does nothing unless a GPU was used
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def move_model(
    model: nn.Module, device: torch.device | None, *, is_channels_last: bool
) -> nn.Module:
    """Move a model to a device, or leave it where it is, with its filters in the order wanted."""
    order = torch.channels_last if is_channels_last else torch.preserve_format
    return model.to(device, memory_format=order)  # type: ignore[call-overload, no-any-return]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of CUDA, the CPU allocator or Python means out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def reset_peak(device: torch.device) -> None:
    """Reset the peaks of a GPU's allocator, and on Linux those of this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Peaks since `reset_peak`, by kind: the process's `rss`; a GPU's `allocated`, `reserved`."""
    peaks = {"rss": peak_rss_bytes()}
    if device.type == "cuda":
        peaks["allocated"] = torch.cuda.max_memory_allocated(device)
        peaks["reserved"] = torch.cuda.max_memory_reserved(device)
    return peaks


def record_peaks(device: torch.device, recorder: Recorder) -> None:
    """Record the peaks since `reset_peak`."""
    for kind, n_bytes in peak_bytes(device).items():
        recorder.sample("memory_peak_bytes", n_bytes, kind=kind)


_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Size assumed for a CPU without that directory (as in some containers).
_UNKNOWN_BYTES = 32 << 20
_LARGEST_BYTES = 256 << 20


def last_cache_bytes(device: torch.device) -> int:
    """Size of a GPU's L2 cache, or of a CPU core's last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_read_size(entry / "size") for entry in _CPU_CACHES.glob("index*")]
    return min(max(sizes, default=0) or _UNKNOWN_BYTES, _LARGEST_BYTES)


def _read_size(path: Path) -> int:
    try:
        return parse_bytes(path.read_text().strip() + "iB")  # the kernel writes 32768K
    except (OSError, ConfigError):
        return 0


class CacheFlush:
    """Evicts the contents of the cache by writing a buffer of the cache's size."""

    def __init__(self, device: torch.device) -> None:
        self.n_bytes = last_cache_bytes(device)
        self._buffer = torch.empty(self.n_bytes, dtype=torch.uint8, device=device)

    def __call__(self, n_bytes: float = math.inf) -> None:
        """Queue the write on the current stream; does not wait for it.

        Args:
            n_bytes: how much to evict; all by default.
        """
        self._buffer[: int(min(n_bytes, self.n_bytes))].zero_()

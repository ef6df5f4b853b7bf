"""Keep freed memory, recognise running out of it, and read peaks, on a GPU or a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import torch

from harness.measure.peak_rss import peak_rss_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_ALREADY_TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_LARGEST_INT = 2**31 - 1
# Blocks up to the first bound stay, or up to the second, where glibc refuses so large a one.
_STAYING_BYTES = (1 << 30, 32 << 20)

# Of the CPU allocator, of CUDA and NCCL, and of libraries whose own workspaces have no room.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def keep_freed_memory(device: torch.device) -> None:
    """Let this process keep the memory that its tensors on the CPU leave, as GPUs' allocators do.

    glibc hands large blocks back to the system, or not, as their neighbours in memory have it, and
    then gets them again page by page: that is half of the backward pass of a convolution of 512 by
    512 channels, or nothing. Does nothing without glibc, or where the environment tells it already.
    """
    if device.type != "cpu" or any(name in os.environ for name in _ALREADY_TOLD):
        return
    with contextlib.suppress(OSError, AttributeError):
        adjust = ctypes.CDLL(None).mallopt
        adjust(_M_TRIM_THRESHOLD, _LARGEST_INT)
        for n_bytes in _STAYING_BYTES:
            if adjust(_M_MMAP_THRESHOLD, n_bytes):
                break


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: CUDA's, the CPU allocator's or Python's own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def reset_peak(device: torch.device) -> None:
    """Forget peaks so far: those of a GPU's allocator; on Linux also this process's own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Peaks since `reset_peak`, by kind: rss of the process; allocated and reserved on a GPU."""
    peaks = {"rss": peak_rss_bytes()}
    if device.type == "cuda":
        peaks["allocated"] = torch.cuda.max_memory_allocated(device)
        peaks["reserved"] = torch.cuda.max_memory_reserved(device)
    return peaks

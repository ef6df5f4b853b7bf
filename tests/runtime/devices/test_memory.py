"""Memory that tensors leave stays with the process."""

import subprocess
import sys

import pytest
import torch

from harness.runtime.devices.memory import is_out_of_memory

_PROGRAM = """
import resource, sys, torch
from harness.runtime.devices.memory import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory(torch.device("cpu"))
def n_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for round in range(30):
    if round == 20:  # the heap has grown until both blocks find a hole
        before = n_faults()
    pair = [torch.ones(40 << 18), torch.ones(40 << 18)]  # above what glibc ever keeps by itself
    del pair
print(n_faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_not_fetched_again_page_by_page():
    def faults(*flags):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *flags], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults() > 1000  # of 204800 pages
    assert faults("keep") < 100


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

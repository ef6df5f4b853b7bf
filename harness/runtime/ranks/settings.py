"""Settings of a rank and its host that change how fast it computes and communicates."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

import torch

from harness.domain.run import GPU_DRIVER, KERNEL
from harness.inputs import one_line
from harness.runtime.ranks.host import nvml

# Variables of the libraries that compute and communicate, and of Open MPI's transports; its others
# say where a launch has its sockets, and one of them is a secret.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|MKL|KMP|TORCH|PYTORCH|CUDA|UCX|MALLOC)_\w+|OMPI_MCA_(btl|coll|pml|mtl|osc)\w*"
)
# They name devices, say what is printed, or are set by entry.sh or torchrun alone. The number of
# threads is set for each run.
_WITHOUT_EFFECT = re.compile(
    r"\w+_(DEBUG|LOGS?|NUM_THREADS|ASYNC_ERROR_HANDLING|if_exclude)(_\w+)?"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)"
)


def read_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The versions of kernel and GPU driver, and the environment variables that matter, by name."""
    found = {KERNEL: platform.release(), GPU_DRIVER: _gpu_driver()}
    for name in sorted(environ):
        if _VARIABLES.fullmatch(name) and not _WITHOUT_EFFECT.fullmatch(name):
            found[name] = one_line(environ[name], 200)
    return {name: value for name, value in found.items() if value}


def _gpu_driver() -> str:
    if not torch.cuda.is_available():
        return ""
    import pynvml

    try:
        with nvml():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:  # in some containers
        return ""

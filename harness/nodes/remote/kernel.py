"""Print which GPUs this torch build supports, as JSON; with argument 1, run a kernel on each.

Runs on the host, in its environment. The kernel is a matrix product with a known result:
ones (256, 256) @ ones (256, 256) is 256 everywhere.
"""

import json
import os
import sys
import warnings

os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi; CUDA reads it once

import torch

SIZE = 256


def run_kernel(index: int) -> str:
    """Multiply on one GPU; returns the error, empty if the product is correct."""
    try:
        with torch.inference_mode():
            ones = torch.ones(SIZE, SIZE, device=f"cuda:{index}")
            wrong = int((ones @ ones != SIZE).sum())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"{wrong} of {SIZE * SIZE} values of a matrix product are wrong" if wrong else ""


def arch_list() -> list[str]:
    """The build's architectures, also without a GPU, where torch.cuda.get_arch_list() is empty."""
    flags = getattr(torch._C, "_cuda_getArchFlags", str)()  # a CPU build has no such function
    return str(flags or "").split()


def main(deep: bool) -> None:
    warnings.simplefilter("ignore")  # torch warns of old GPUs; the sender judges them
    state: dict[str, object] = {
        "cuda": torch.version.cuda,
        "arch_list": arch_list(),
        "is_available": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        indices = range(torch.cuda.device_count())
        state["capabilities"] = [list(torch.cuda.get_device_capability(i)) for i in indices]
        if deep:
            state["kernel_errors"] = [run_kernel(i) for i in indices]
    print(json.dumps(state))


if __name__ == "__main__":
    main(sys.argv[1] == "1")

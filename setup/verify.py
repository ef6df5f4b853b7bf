"""Verify an installation: two ranks must form one MPI world; print the installed versions.

Started by `mpirun -np 2`. With a library of another MPI than mpirun's, each rank is its own world.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch

N_RANKS = 2


def gpu_problem() -> str:
    """A warning if ranks would use the CPU although NVML sees GPUs; else empty."""
    n_gpus = torch.cuda.device_count() if torch.version.cuda else 0
    if n_gpus == 0 or torch.cuda.is_available():
        return ""
    return (
        f"this host has {n_gpus} GPUs, and this torch (CUDA {torch.version.cuda}) cannot start "
        "them, so that ranks take the CPU: update the driver, or install a torch for its CUDA"
    )


def main() -> None:
    """Verify on all ranks; rank 0 prints."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != N_RANKS:
        sys.exit(f"mpirun started {N_RANKS} ranks and MPI sees {world.size}: two MPIs are mixed")
    if world.rank == 0:
        names = ("torch", "torchvision", "mpi4py", "deepspeed")
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        library = MPI.Get_library_version().split(",")[0]
        print(", ".join([*(f"{name} {version(name)}" for name in names), library, build]))
        if problem := gpu_problem():
            print(f"warning: {problem}")


if __name__ == "__main__":
    main()

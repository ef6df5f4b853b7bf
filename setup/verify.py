"""Check an installation from inside: two ranks of one world, and the versions they see.

Started by `mpirun -np 2`. A library that loads but belongs to another MPI makes two worlds of one.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch

N_RANKS = 2


def gpu_problem() -> str:
    """Why ranks would take the CPU beside GPUs that NVML sees; empty where they would not."""
    n_gpus = torch.cuda.device_count() if torch.version.cuda else 0
    if n_gpus == 0 or torch.cuda.is_available():
        return ""
    return (
        f"this host has {n_gpus} GPUs, and this torch (CUDA {torch.version.cuda}) cannot start "
        "them, so that ranks take the CPU: update the driver, or install a torch for its CUDA"
    )


def main() -> None:
    """All ranks; rank 0 prints."""
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

"""Check an installation from inside: two ranks of one world, and the versions they see.

Started by `mpirun -np 2`. A library that loads but belongs to another MPI makes two worlds of one.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from mpi4py import MPI

N_RANKS = 2


def main() -> None:
    """All ranks; rank 0 prints."""
    world = MPI.COMM_WORLD
    if world.size != N_RANKS:
        sys.exit(f"mpirun started {N_RANKS} ranks and MPI sees {world.size}: two MPIs are mixed")
    if world.rank == 0:
        names = ("torch", "torchvision", "mpi4py", "deepspeed")
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        library = MPI.Get_library_version().split(",")[0]
        print(", ".join([*(f"{name} {version(name)}" for name in names), library, build]))


if __name__ == "__main__":
    main()

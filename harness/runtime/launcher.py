"""Who this rank is, from the environment of whatever launched it.

Open MPI 4 and 5, MPICH (Hydra's PMI), Slurm's srun, torchrun, or nothing (one rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import LaunchError

# srun's own steps count from 0; batch and extern steps are numbered from the top.
_FIRST_SPECIAL_SLURM_STEP = 4294967290


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A rank's place among the ranks, as its launcher says.

    Attributes:
        launcher: openmpi, mpich, torchrun, slurm or none.
        has_mpi: whether ranks can meet over MPI.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    has_mpi: bool


def _whole(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name)
    if text is None or not text.isdigit():
        raise LaunchError(
            f"{launcher} should set {name} to a whole number, it is {text!r}: start the ranks with "
            "mpirun, srun or torchrun, or unset that launcher's other variables"
        )
    return int(text)


def _first(environ: Mapping[str, str], names: list[str], default: int) -> int:
    return next((int(environ[n]) for n in names if environ.get(n, "").isdigit()), default)


def _torchrun(environ: Mapping[str, str]) -> Launch:
    rank = _whole(environ, "RANK", "torchrun")
    return Launch(
        launcher="torchrun",
        rank=rank,
        size=_whole(environ, "WORLD_SIZE", "torchrun"),
        local_rank=_first(environ, ["LOCAL_RANK"], 0),
        local_size=_first(environ, ["LOCAL_WORLD_SIZE"], 1),
        has_mpi=False,
    )


def _openmpi(environ: Mapping[str, str]) -> Launch:
    return Launch(
        launcher="openmpi",
        rank=_whole(environ, "OMPI_COMM_WORLD_RANK", "Open MPI"),
        size=_whole(environ, "OMPI_COMM_WORLD_SIZE", "Open MPI"),
        local_rank=_whole(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI"),
        local_size=_whole(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI"),
        has_mpi=True,
    )


def _mpich(environ: Mapping[str, str]) -> Launch:
    return Launch(
        launcher="mpich",
        rank=_whole(environ, "PMI_RANK", "MPICH"),
        size=_whole(environ, "PMI_SIZE", "MPICH"),
        local_rank=_first(environ, ["MPI_LOCALRANKID", "SLURM_LOCALID"], 0),
        local_size=_first(environ, ["MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"], 1),
        has_mpi=True,
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    return Launch(
        launcher="slurm",
        rank=_whole(environ, "SLURM_PROCID", "Slurm"),
        size=_first(environ, ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], 1),
        local_rank=_first(environ, ["SLURM_LOCALID"], 0),
        local_size=_first(environ, ["SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"], 1),
        has_mpi=False,
    )


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_SPECIAL_SLURM_STEP


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Find the innermost launcher and read this rank's place from its variables.

    Raises:
        LaunchError: a launcher's variables are incomplete or contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        launch = _torchrun(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ:
        launch = _openmpi(environ)
    elif "PMI_RANK" in environ:
        launch = _mpich(environ)
    elif _is_slurm_step(environ):
        launch = _slurm(environ)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        launch = _torchrun(environ)
    else:
        launch = Launch(launcher="none", rank=0, size=1, local_rank=0, local_size=1, has_mpi=False)
    if not launch.rank < launch.size:
        raise LaunchError(
            f"{launch.launcher} says rank {launch.rank} of {launch.size} ranks: "
            "ranks count from 0, so its environment is stale; start from a clean shell"
        )
    return launch

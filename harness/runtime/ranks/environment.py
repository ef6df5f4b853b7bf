"""Read this rank's number and the number of ranks from the launcher's environment variables.

LAUNCHERS are Open MPI 4 and 5, MPICH (Hydra's PMI), Slurm's srun and torchrun; without one there
is one rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from harness.errors import LaunchError
from harness.inputs import find_int, parse_int, shorten

# srun numbers its steps from 0; batch and extern steps have the highest numbers.
_FIRST_SPECIAL_SLURM_STEP = 4294967290
_MAX_RANKS = 1_000_000
Environ = Mapping[str, str]
# Warn of the model or its data alone, so equally on every rank.
_ALIKE = (
    "harness.runtime.capture",
    "harness.runtime.data.own",
    "harness.runtime.models",
    "harness.runtime.tracing",
)
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def leave_warnings_to_rank_0(rank: int) -> None:
    """Let rank 0 alone tell of what every rank finds in the model and its data."""
    for package in _ALIKE if rank != 0 else ():
        logging.getLogger(package).setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A rank's number among all ranks, as the launcher sets it.

    Attributes:
        launcher: its name as in LAUNCHERS, in small letters without blanks, or none.
        has_mpi: whether the rendezvous can use MPI.
    """

    launcher: str
    rank: int
    size: int
    has_mpi: bool


def _launch(
    launcher: str, rank: str, size: str, environ: Environ, *, has_mpi: bool = False
) -> Launch:
    """Read the variables of a launcher, and check the numbers against each other."""
    numbers = [
        parse_int(
            environ.get(name, ""), f"{launcher}'s {name}", at_most=_MAX_RANKS, error=LaunchError,
            remedy="start the ranks with mpirun, srun or torchrun, or unset its other variables",
        )
        for name in (rank, size)
    ]  # fmt: skip
    name = launcher.lower().replace(" ", "")
    found = Launch(launcher=name, rank=numbers[0], size=numbers[1], has_mpi=has_mpi)
    if not found.rank < found.size:
        raise LaunchError(
            f"{launcher} says rank {found.rank} of {found.size} ranks: "
            "ranks count from 0, so its environment is stale; start from a clean shell"
        )
    return found


def read_port(environ: Environ) -> int:
    """Read MASTER_PORT; raises LaunchError if it is no port."""
    return parse_int(
        environ.get("MASTER_PORT", ""), "MASTER_PORT", at_least=1, at_most=65535,
        error=LaunchError, remedy="as in MASTER_PORT=29500, the same on every rank",
    )  # fmt: skip


def read_address(environ: Environ) -> str:
    """Read MASTER_ADDR; raises LaunchError if it is no host name or address."""
    address = environ.get("MASTER_ADDR", "")
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,255}", address, re.ASCII):
        raise LaunchError(
            f"MASTER_ADDR is {shorten(address)}, no host name or address: set it to rank 0's host, "
            "the same on every rank"
        )
    return address


def _torchrun(environ: Environ) -> Launch:
    read_address(environ)
    read_port(environ)
    return _launch("torchrun", "RANK", "WORLD_SIZE", environ)


def _slurm(environ: Environ) -> Launch:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return _launch("Slurm", "SLURM_PROCID", size, {"SLURM_NTASKS": "1", **environ})


def _is_slurm_step(environ: Environ) -> bool:
    """Whether srun started this process; a batch script runs in a step of a special number."""
    if "SLURM_STEP_ID" not in environ:
        return False
    step = parse_int(
        environ["SLURM_STEP_ID"], "SLURM_STEP_ID", error=LaunchError,
        remedy="start the ranks with srun, or unset it",
    )  # fmt: skip
    return step < _FIRST_SPECIAL_SLURM_STEP


def _is_srun_pmi(environ: Environ) -> bool:
    """Whether PMI's variables are those of `srun --mpi=pmi2`, which a site may have as its default.

    They do not say that mpi4py's MPI can use them; Hydra, also inside a job, counts a host's ranks.
    """
    return _is_slurm_step(environ) and "MPI_LOCALNRANKS" not in environ


def _check_incomplete_launcher(environ: Environ) -> None:
    """Refuse incomplete variables, because each rank would run alone and report for all."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in environ]
    if "RANK" in environ and find_int(environ.get("WORLD_SIZE", "1"), 1, 1) is None and missing:
        raise LaunchError(
            f"RANK is {shorten(environ['RANK'])} and WORLD_SIZE "
            f"{shorten(environ.get('WORLD_SIZE', ''))}, but {', '.join(missing)} is not set: start "
            "the ranks with torchrun, or unset RANK and WORLD_SIZE"
        )


# The innermost first: whether it has started this process, and the reader of its variables.
LAUNCHERS: list[tuple[Callable[[Environ], bool], Callable[[Environ], Launch]]] = [
    (lambda environ: "TORCHELASTIC_RUN_ID" in environ, _torchrun),
    (
        lambda environ: "OMPI_COMM_WORLD_RANK" in environ,
        partial(_launch, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", has_mpi=True),
    ),
    (
        lambda environ: "PMI_RANK" in environ and not _is_srun_pmi(environ),
        partial(_launch, "MPICH", "PMI_RANK", "PMI_SIZE", has_mpi=True),
    ),
    (_is_slurm_step, _slurm),
    (lambda environ: environ.keys() >= set(_TORCHRUN_VARIABLES), _torchrun),
]


def is_first_on_host(environ: Environ) -> bool:
    """Whether torchrun or srun has started this rank as the first one of its host."""
    return environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID")) in (None, "0")


def read_launch(environ: Environ) -> Launch:
    """Find the innermost launcher and read its variables.

    Raises:
        LaunchError: a launcher's variables are incomplete or contradict each other.
    """
    for has_started, read in LAUNCHERS:
        if has_started(environ):
            return read(environ)
    _check_incomplete_launcher(environ)
    return Launch(launcher="none", rank=0, size=1, has_mpi=False)

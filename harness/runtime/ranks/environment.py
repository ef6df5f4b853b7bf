"""Read this rank's number and the number of ranks from the launcher's environment variables.

Launchers: Open MPI 4 and 5, MPICH (Hydra's PMI), Slurm's srun, torchrun, or none (one rank).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import LaunchError
from harness.inputs import find_int, parse_int, shorten

# srun numbers its steps from 0; batch and extern steps have the highest numbers.
_FIRST_SPECIAL_SLURM_STEP = 4294967290
_MAX_RANKS = 1_000_000
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A rank's number among all ranks and on its host, as the launcher sets them.

    Attributes:
        launcher: openmpi, mpich, torchrun, slurm or none.
        has_mpi: whether the rendezvous can use MPI.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    has_mpi: bool


def _read_int(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name)
    value = None if text is None else find_int(text, 0, _MAX_RANKS)
    if value is None:
        shown = "not set" if text is None else shorten(text)
        raise LaunchError(
            f"{launcher} should set {name} to a whole number up to {_MAX_RANKS}, it is {shown}: "
            "start the ranks with mpirun, srun or torchrun, or unset the launcher's other variables"
        )
    return value


def _read_any(environ: Mapping[str, str], names: list[str], launcher: str) -> int | None:
    """The value of the first variable that is set, or None."""
    name = next((name for name in names if name in environ), None)
    return None if name is None else _read_int(environ, name, launcher)


def _launch(
    launcher: str,
    rank: int,
    size: int,
    local: tuple[int | None, int | None],
    *,
    has_mpi: bool,
) -> Launch:
    """Check the numbers against each other; missing local ones default to one rank a host."""
    local_rank, local_size = local
    if not rank < size:
        raise LaunchError(
            f"{launcher} says rank {rank} of {size} ranks: "
            "ranks count from 0, so its environment is stale; start from a clean shell"
        )
    if local_size is not None and not max(local_rank or 0, 0) < local_size <= size:
        raise LaunchError(
            f"{launcher} says local rank {local_rank or 0} of {local_size} on this host, of {size} "
            "ranks in all: its environment is stale; start from a clean shell"
        )
    return Launch(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank or 0,
        local_size=local_size or 1,
        has_mpi=has_mpi,
    )


def read_port(environ: Mapping[str, str]) -> int:
    """Read MASTER_PORT; raises LaunchError if it is no port."""
    return parse_int(
        environ.get("MASTER_PORT", ""), "MASTER_PORT", at_least=1, at_most=65535,
        error=LaunchError, remedy="as in MASTER_PORT=29500, the same on every rank",
    )  # fmt: skip


def read_address(environ: Mapping[str, str]) -> str:
    """Read MASTER_ADDR; raises LaunchError if it is no host name or address."""
    address = environ.get("MASTER_ADDR", "")
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,255}", address, re.ASCII):
        raise LaunchError(
            f"MASTER_ADDR is {shorten(address)}, no host name or address: set it to rank 0's host, "
            "the same on every rank"
        )
    return address


def _torchrun(environ: Mapping[str, str]) -> Launch:
    name = "torchrun"
    read_address(environ)
    read_port(environ)
    return _launch(
        name,
        _read_int(environ, "RANK", name),
        _read_int(environ, "WORLD_SIZE", name),
        (_read_any(environ, ["LOCAL_RANK"], name), _read_any(environ, ["LOCAL_WORLD_SIZE"], name)),
        has_mpi=False,
    )


def _openmpi(environ: Mapping[str, str]) -> Launch:
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _launch(
        "openmpi",
        _read_int(environ, "OMPI_COMM_WORLD_RANK", "Open MPI"),
        _read_int(environ, "OMPI_COMM_WORLD_SIZE", "Open MPI"),
        (_read_int(environ, local[0], "Open MPI"), _read_int(environ, local[1], "Open MPI")),
        has_mpi=True,
    )


def _mpich(environ: Mapping[str, str]) -> Launch:
    size = _read_int(environ, "PMI_SIZE", "MPICH")
    local_size = _read_any(environ, ["MPI_LOCALNRANKS"], "MPICH")
    return _launch(
        "mpich",
        _read_int(environ, "PMI_RANK", "MPICH"),
        size,
        (
            _read_any(environ, ["MPI_LOCALRANKID", "SLURM_LOCALID"], "MPICH"),
            local_size or _slurm_max_local_size(environ, size),
        ),
        has_mpi=True,
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    size = _read_any(environ, ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], "Slurm")
    size = 1 if size is None else size
    return _launch(
        "slurm",
        _read_int(environ, "SLURM_PROCID", "Slurm"),
        size,
        (_read_any(environ, ["SLURM_LOCALID"], "Slurm"), _slurm_local_size(environ, size)),
        has_mpi=False,
    )


def _slurm_max_local_size(environ: Mapping[str, str], size: int) -> int | None:
    """The job's limit of ranks a node, which a small step does not reach."""
    limit = _read_any(environ, ["SLURM_NTASKS_PER_NODE"], "Slurm")
    return None if limit is None else min(limit, size)


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int | None:
    """This node's ranks; `2(x3),1` means three nodes of two ranks, then one of one."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in environ:
        return _slurm_max_local_size(environ, size)
    node = _read_any(environ, ["SLURM_NODEID"], "Slurm") or 0
    for part in environ[name].split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part.strip(), re.ASCII)
        if match is None:
            raise LaunchError(
                f"Slurm should set {name} to ranks of each node, like 2(x3), it is "
                f"{shorten(environ[name])}: start the ranks with srun, or unset it"
            )
        n_nodes = int(match[2] or 1)
        if node < n_nodes:
            return int(match[1])
        node -= n_nodes
    raise LaunchError(
        f"Slurm says SLURM_NODEID {shorten(environ.get('SLURM_NODEID', '0'))}, and {name} "
        f"{shorten(environ[name])} has fewer nodes: start from a clean shell"
    )


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script runs in a step of a special number."""
    if "SLURM_STEP_ID" not in environ:
        return False
    step = parse_int(
        environ["SLURM_STEP_ID"], "SLURM_STEP_ID", error=LaunchError,
        remedy="start the ranks with srun, or unset it",
    )  # fmt: skip
    return step < _FIRST_SPECIAL_SLURM_STEP


def _check_incomplete_launcher(environ: Mapping[str, str]) -> None:
    """Refuse incomplete variables, because each rank would run alone and report for all."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in environ]
    if "RANK" in environ and find_int(environ.get("WORLD_SIZE", "1"), 1, 1) is None and missing:
        raise LaunchError(
            f"RANK is {shorten(environ['RANK'])} and WORLD_SIZE "
            f"{shorten(environ.get('WORLD_SIZE', ''))}, but {', '.join(missing)} is not set: start "
            "the ranks with torchrun, or unset RANK and WORLD_SIZE"
        )


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Find the innermost launcher and read its variables.

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
    elif environ.keys() >= set(_TORCHRUN_VARIABLES):
        launch = _torchrun(environ)
    else:
        _check_incomplete_launcher(environ)
        launch = Launch(launcher="none", rank=0, size=1, local_rank=0, local_size=1, has_mpi=False)
    return launch

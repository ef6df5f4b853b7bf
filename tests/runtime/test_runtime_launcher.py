"""Each launcher's variables give the same five numbers."""

import pytest

from harness.errors import LaunchError
from harness.runtime.launcher import read_launch

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [(OPENMPI, "openmpi"), (MPICH, "mpich"), (TORCHRUN, "torchrun"), (SLURM, "slurm")],
)
def test_a_launchers_variables_give_the_place(environ, launcher):
    launch = read_launch(environ)
    assert launch.launcher == launcher
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 5, 1, 2)
    assert launch.has_mpi == (launcher in ("openmpi", "mpich"))


def test_without_a_launcher_there_is_one_rank():
    launch = read_launch({"HOME": "/root"})
    assert (launch.launcher, launch.rank, launch.size) == ("none", 0, 1)


def test_torchrun_inside_a_slurm_job_wins():
    assert read_launch({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_a_batch_script_is_not_a_step():
    batch = {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0", "SLURM_NTASKS": "5"}
    assert read_launch(batch).size == 1


def test_a_rank_beyond_the_size_names_both():
    with pytest.raises(LaunchError, match="rank 5 of 5"):
        read_launch({**OPENMPI, "OMPI_COMM_WORLD_RANK": "5"})


def test_an_incomplete_environment_names_the_variable():
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_SIZE"):
        read_launch({"OMPI_COMM_WORLD_RANK": "0"})

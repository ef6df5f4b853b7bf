"""Each launcher's variables give the same numbers; what a host is, and rank 0's terminal."""

import errno
import io
import itertools
import platform
import socket
from collections import namedtuple

import psutil
import pytest

from harness.errors import LaunchError
from harness.runtime.ranks import cgroup
from harness.runtime.ranks.environment import read_launch
from harness.runtime.ranks.host import processor_seconds, read_settings
from harness.runtime.ranks.interfaces import shaped_rates
from harness.runtime.ranks.world import Progress

OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "5"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "5"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}  # fmt: skip
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (OPENMPI, "openmpi"), (MPICH, "mpich"), (TORCHRUN, "torchrun"), (SLURM, "slurm"),
        (SLURM | TORCHRUN, "torchrun"),
        (SLURM | MPICH, "slurm"),  # PMI of srun is no MPI
        (SLURM | MPICH | {"MPI_LOCALNRANKS": "1"}, "mpich"),
    ],
)  # fmt: skip
def test_the_variables_of_the_innermost_launcher_give_the_place(environ, launcher):
    launch = read_launch(environ)
    assert launch.launcher == launcher
    assert (launch.rank, launch.size) == (3, 5)
    assert launch.has_mpi == (launcher in ("openmpi", "mpich"))


def test_without_a_launcher_there_is_one_rank():
    batch = {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0", "SLURM_NTASKS": "5"}
    for environ in ({"HOME": "/root"}, batch):  # a batch script is not a step
        launch = read_launch(environ)
        assert (launch.launcher, launch.rank, launch.size) == ("none", 0, 1)


def test_an_incomplete_environment_names_the_variable():
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_SIZE"):
        read_launch({"OMPI_COMM_WORLD_RANK": "0"})


HOSTILE = ["", "x", "-1", "1.5", "\u00b2", "\u0663", "9" * 5000, "1 2", "a[$(touch /tmp/x)]", "1e3"]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    ("environ", "name"),
    [(OPENMPI, name) for name in OPENMPI]
    + [(MPICH, name) for name in MPICH]
    + [(TORCHRUN, name) for name in TORCHRUN if "MASTER" not in name and "ID" not in name]
    + [(TORCHRUN, "MASTER_PORT")]
    + [(SLURM, name) for name in SLURM],
)
def test_a_malformed_variable_is_named_with_its_value_and_a_remedy(environ, name, value):
    with pytest.raises(LaunchError) as caught:
        read_launch({**environ, name: value})
    message = str(caught.value)
    assert name in message
    assert len(message) < 400
    assert "\n" not in message
    assert any(word in message for word in ("start", "as in MASTER_PORT"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "5"}, "rank 5 of 5 ranks"),
        ({"WORLD_SIZE": "0"}, "rank 3 of 0"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x': write a whole number from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is '', no host name"),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR is 'a b'"),
        ({"MASTER_ADDR": "$(id)"}, "MASTER_ADDR is"),
    ],
)
def test_numbers_that_contradict_each_other_are_named(changes, message):
    with pytest.raises(LaunchError, match=message.replace("(", r"\(").replace("$", r"\$")):
        read_launch({**TORCHRUN, **changes})


def test_a_rank_that_cannot_meet_the_others_does_not_run_alone():
    half = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    with pytest.raises(LaunchError, match="RANK is '1' and WORLD_SIZE '4', but MASTER_ADDR is not"):
        read_launch(half)
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}).launcher == "none"


def test_a_place_to_meet_that_cannot_be_is_said_before_torch_gives_up(monkeypatch):
    from harness.runtime.ranks import rendezvous
    from harness.runtime.ranks.rendezvous import _connect_at_master

    nowhere = {**TORCHRUN, "MASTER_ADDR": "no-such-host.invalid"}
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is no-such-host\.invalid, which"):
        _connect_at_master(read_launch(nowhere), nowhere)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        first = {**TORCHRUN, "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(LaunchError, match=rf"rank 0 cannot serve .* MASTER_PORT {port}"):
            _connect_at_master(read_launch(first), first)

    def unreachable(*_, **__):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(rendezvous, "_UNREACHABLE_S", 0.0)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    where = r"cannot reach MASTER_ADDR 127\.0\.0\.1, MASTER_PORT \d+ from lo 127\.0\.0\.1"
    for rank, host in (("0", "this host"), ("3", "rank 0's host")):
        silent = {**first, "RANK": rank}
        with pytest.raises(LaunchError, match=f"rank {rank} on .* {where} .*address of {host}"):
            _connect_at_master(read_launch(silent), silent)


def test_a_shaper_at_the_root_limits_its_interface():
    qdiscs = [
        {"kind": "noqueue", "dev": "lo", "root": True, "options": {}},
        {"kind": "tbf", "dev": "eth0", "root": True, "options": {"rate": 12500000}},
        {"kind": "tbf", "dev": "eth1", "parent": "1:1", "options": {"rate": 1}},
    ]
    assert shaped_rates(qdiscs) == {"eth0": 100e6}


_Times = namedtuple("_Times", "user system idle steal guest guest_nice")


def test_guests_of_this_host_are_not_counted_twice(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times", lambda: _Times(40.0, 5.0, 50.0, 5.0, 30.0, 2.0))
    assert processor_seconds() == (5.0, 100.0)


@pytest.mark.parametrize(
    ("membership", "files", "quota_s", "n_bytes", "n_kills"),
    [
        # Slurm limits the job, and counts in the task's group.
        ("0::/job/task", {
            "job/task/cpu.max": "max 100000", "job/cpu.max": "150000 100000", "cpu.max": "400000 1",
            "job/task/memory.max": "max", "job/memory.max": "4096", "memory.max": "8192",
            "job/task/memory.events": "oom 3\noom_kill 2", "job/memory.events": "oom_kill 9",
        }, (0.15, 0.1), 4096, 2),
        # A container of version 1, whose membership is the host's.
        ("5:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n0::/", {
            "cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "4096", "memory/memory.oom_control": "oom_kill 1",
        }, (0.05, 0.1), 4096, 1),
        ("4:memory:/a\n1:cpu:/a", {
            "cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000",
        }, None, cgroup.UNLIMITED_BYTES, 0),
    ],
)  # fmt: skip
def test_limits_of_the_groups_around_this_processs_hold_too(
    membership, files, quota_s, n_bytes, n_kills, monkeypatch, tmp_path
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "membership").write_text(f"{membership}\n")
    monkeypatch.setattr(cgroup, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", tmp_path / "membership")
    assert cgroup.cpu_quota_s() == pytest.approx(quota_s)
    assert (cgroup.cgroup_memory_bytes(), cgroup.n_oom_kills()) == (n_bytes, n_kills)


class Gone(io.StringIO):
    """A terminal whose session has ended."""

    n_writes = 0

    def isatty(self):
        return True

    def write(self, text):
        self.n_writes += 1
        raise OSError(5, "Input/output error")


def test_a_run_goes_on_where_nobody_reads_its_progress(monkeypatch):
    stream = Gone()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress(is_shown=True)
    for done in (1, 2):
        progress.update("train", done, 2)
    assert stream.n_writes == 1
    monkeypatch.setattr("sys.stderr", None)
    Progress(is_shown=True).update("train", 2, 2)


def test_progress_tells_the_time_left(monkeypatch, capsys):
    clock = itertools.chain([0.0, 0.0, 12.0, 24.0], itertools.repeat(60.0))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress = Progress(is_shown=True)
    for label, done in (("steps", 1), ("steps", 7), ("steps", 13), ("others", 13), ("steps", 301)):
        progress.update(label, done, 301)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "steps: 7/301, about 9.8 min left",
        "steps: 13/301, about 9.6 min left",
        "others: 13/301",
    ]


def test_variables_that_change_speed_are_kept_and_no_others():
    kept = {
        "NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMPI_MCA_btl_tcp_links": "2",
        "NCCL_TOPOLOGY_HINT": "ring",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }  # fmt: skip
    left_out = {
        "OMPI_MCA_orte_precondition_transports": "a secret", "NCCL_DEBUG": "INFO", "HOME": "/root",
        "TORCH_LOGS": "dynamo",
        "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "4", "MY_NCCL_TOKEN": "a secret",
        "TORCH_CPP_LOG_LEVEL": "ERROR", "OMPI_MCA_ess_base_vpid": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMPI_MCA_btl_tcp_if_exclude": "docker0",
    }  # fmt: skip
    found = read_settings({**kept, **left_out})
    assert found.pop("kernel") == platform.release()
    found.pop("GPU driver", None)
    assert found == kept


def test_a_value_is_one_short_line():
    found = read_settings({"NCCL_TOPO_FILE": "a\nb" + "c" * 1000})
    assert found["NCCL_TOPO_FILE"].startswith("a bccc")
    assert len(found["NCCL_TOPO_FILE"]) == 200

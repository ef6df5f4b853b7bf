"""The environment that entry.sh makes: settings of the hosts, threads, interfaces and GPUs."""

import signal
import sys

import pytest
from launching import ROOT, completed, entry, turkish, write_program


def test_gpus_are_numbered_as_nvml_does_and_have_all_queues_unless_told(tmp_path):
    write_program(tmp_path / "bin" / "python", '#!/bin/sh\n[ "$1" = -c ] || env\n')
    # As an editor on Windows writes it.
    (tmp_path / "cluster.env").write_bytes(b"\xef\xbb\xbfCUDA_DEVICE_MAX_CONNECTIONS=1\r\n\r\n")

    def told(hosts):
        done = entry(HARNESS_VENV=str(tmp_path), HARNESS_HOSTS=str(hosts))
        seen = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        return seen["CUDA_DEVICE_ORDER"], seen["CUDA_DEVICE_MAX_CONNECTIONS"]

    assert told(tmp_path / "none") == ("PCI_BUS_ID", "32")
    assert told(tmp_path) == ("PCI_BUS_ID", "1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("PATH=/evil", "PATH may not be set here"),
        ("rm -rf /", "is not NAME=VALUE"),
        ("OMPI_MCA_oob_tcp_if_include=eth0", "mpirun --mca oob_tcp_if_include eth0"),
        ("OMPI_MCA_hwloc_base_binding_policy=none", "hwloc_base_binding_policy is mpirun's"),
        ('NCCL_SOCKET_IFNAME="eth0"', "quotes or a comment in its value: write NCCL_SOCKET_IFNAME="
         "eth0\n"),
        ("NCCL_SOCKET_IFNAME='eth0' # the fast one", "its value: write NCCL_SOCKET_IFNAME=eth0\n"),
        ("OMP_NUM_THREADS=8\t# half", "OMP_NUM_THREADS has quotes or a comment in its value: write "
         "OMP_NUM_THREADS=8\n"),
    ],
)  # fmt: skip
def test_settings_files_are_data(tmp_path, line, message):
    (tmp_path / "cluster.env").write_text(f"# a comment\nNCCL_DEBUG=INFO\n{line}\n")
    done = entry("--help", HARNESS_HOSTS=str(tmp_path))
    assert done.returncode == 2
    assert message in done.stderr
    assert "cluster.env:3" in done.stderr


@pytest.mark.parametrize(
    "data", [b"NCCL_A=1\n" * 10_000, b" " * 10**6, b"N\0C\0=\0\x1b]\0", b"x" * 999]
)
def test_settings_that_are_none_end_in_one_short_line(tmp_path, data):
    (tmp_path / "cluster.env").write_bytes(data)
    done = entry("--help", HARNESS_HOSTS=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 300
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCAL_WORLD_SIZE", "a[$(touch {tmp}/pwned)]"),
        ("LOCAL_WORLD_SIZE", ""),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "0"),
        ("MPI_LOCALNRANKS", "\u00b2"),
        ("MPI_LOCALNRANKS", "08"),
        ("OMP_NUM_THREADS", "lots"),
        ("OMP_NUM_THREADS", "-1"),
        ("MKL_NUM_THREADS", "9" * 5000),
    ],
)
def test_a_number_in_the_environment_is_read_as_data(tmp_path, name, value):
    done = entry("--help", **{name: value.format(tmp=tmp_path)})
    assert done.returncode == 2
    assert f": {name} is " in done.stderr
    assert "set it to a whole number above 0" in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 300
    assert not list(tmp_path.iterdir())


def test_an_environment_that_is_being_installed_is_refused(tmp_path):
    write_program(tmp_path / "bin" / "python", f'#!/bin/sh\n{sys._base_executable} -IS "$@"\n')
    done = entry("--help", HARNESS_VENV=str(tmp_path))
    assert done.returncode == 2
    assert f"the environment at {tmp_path} is not complete: wait for" in done.stderr


def test_an_environment_whose_python_is_missing_is_not_to_be_installed_again(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/opt/none/bin/python3.11")
    (tmp_path / "pyvenv.cfg").write_text("home = /opt/none/bin\n")
    done = entry("--help", HARNESS_VENV=str(tmp_path))
    assert done.returncode == 2
    assert f"the environment at {tmp_path} needs the Python in /opt/none/bin, which" in done.stderr


def test_a_launch_by_another_mpi_is_refused_before_it_fails(tmp_path):
    write_program(tmp_path / "bin" / "python", "#!/bin/sh\necho started\n")
    assert "started" in entry("matmul", HARNESS_VENV=str(tmp_path), MPI_LOCALNRANKS="2").stdout
    write_program(tmp_path / "bin" / "ompi_info", "#!/bin/sh\n")
    done = entry("matmul", HARNESS_VENV=str(tmp_path), MPI_LOCALNRANKS="2")
    assert done.returncode == 2
    assert f"start with {tmp_path}/bin/mpirun" in done.stderr


def test_threads_are_what_the_ranks_of_a_host_share(tmp_path):
    write_program(tmp_path / "bin" / "python", "#!/bin/sh\nenv\n")
    done = entry(
        "matmul", HARNESS_VENV=str(tmp_path), LOCAL_WORLD_SIZE="100000", OMP_NUM_THREADS=""
    )
    assert "OMP_NUM_THREADS=1\n" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "OMP_NUM_THREADS=1 \t",  # blanks are none of it
        "OMPI_MCA_btl_tcp_if_include=10.0.0.0/24",  # reaches ranks
    ],
)
def test_settings_that_reach_ranks_are_taken_without_their_blanks(tmp_path, line):
    (tmp_path / "cluster.env").write_text(f"{line}\n")
    assert entry("--help", HARNESS_HOSTS=str(tmp_path)).returncode == 0


def test_settings_are_the_same_in_every_language(tmp_path):
    (tmp_path / "cluster.env").write_text("NCCL_IB_DISABLE=1\n")
    done = entry("--help", HARNESS_HOSTS=str(tmp_path), **turkish(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("chosen", "has_exclusions"), [({}, True), ({"OMPI_MCA_btl_tcp_if_include": "eth1"}, False)]
)
def test_a_chosen_interface_replaces_the_exclusions(tmp_path, chosen, has_exclusions):
    """Open MPI ends a job that has both settings."""
    write_program(tmp_path / "bin" / "python", "#!/bin/sh\nenv\n")
    done = entry("matmul", HARNESS_VENV=str(tmp_path), **chosen)
    assert done.returncode == 0, done.stderr
    assert ("OMPI_MCA_btl_tcp_if_exclude=" in done.stdout) == has_exclusions


@pytest.mark.parametrize(
    ("below", "is_inner"),
    [
        ("", True),
        ("lower_veth1", True),
        ("lower_eth0/device", False),
        ("lower_bond0/lower_eth0/device", False),
    ],
)
def test_only_a_bridge_above_no_physical_device_is_left_to_containers(tmp_path, below, is_inner):
    (tmp_path / "br-1f2e/bridge").mkdir(parents=True)
    (tmp_path / "br-1f2e" / below).mkdir(parents=True, exist_ok=True)
    (tmp_path / "eth0/device").mkdir(parents=True)
    lines = (ROOT / "entry.sh").read_text()
    function = "inner_bridges() {" + lines.partition("inner_bridges() {")[2].partition("\n}\n")[0]
    script = f"{function}\n}}\ninner_bridges {tmp_path}"
    done = completed("bash", "-euc", script)
    assert done.stdout == (",br-1f2e" if is_inner else "")


def test_ctrl_c_waits_until_the_agent_can_take_it(tmp_path):
    shown = '#!/bin/bash\n[ "$1" = -c ] || grep SigBlk /proc/self/status\n'
    write_program(tmp_path / "bin" / "python", shown)
    blocked = int(entry(HARNESS_VENV=str(tmp_path)).stdout.split()[1], 16)
    assert blocked >> signal.SIGINT - 1 & 1


def test_a_link_to_it_starts_the_program_of_the_checkout(tmp_path):
    (tmp_path / "entry.sh").symlink_to(ROOT / "entry.sh")
    done = completed(tmp_path / "entry.sh", "--help", cwd=tmp_path, HARNESS_VENV=sys.prefix)
    assert done.returncode == 0, done.stderr
    assert "workloads:" in done.stdout


def test_a_package_of_its_name_in_the_current_directory_is_not_started(tmp_path):
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness/__init__.py").write_text("raise SystemExit('another package')")
    done = completed(ROOT / "entry.sh", "--help", cwd=tmp_path, HARNESS_VENV=sys.prefix)
    assert done.returncode == 0, done.stderr

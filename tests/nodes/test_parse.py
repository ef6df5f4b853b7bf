import pytest

from harness.nodes.facts import Disk, PeerRoute
from harness.nodes.parse import (
    parse_disks,
    parse_facts,
    parse_limits,
    parse_mpi,
    parse_python,
    parse_routes,
    split_sections,
)

TEXT = """Welcome to ecetesla0!
@harness:hostname
ecetesla0
@harness:kernel
Linux 6.1.0-18-amd64 x86_64
@harness:os
PRETTY_NAME="Ubuntu 22.04.4 LTS"
NAME="Ubuntu"
@harness:shell
ada
/bin/tcsh
@harness:cpus_allowed
Cpus_allowed_list:\t0-7,16-23
@harness:cpu_model
model name\t: Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz
@harness:load
0.52 0.58 0.59 1/467 3412
@harness:memory
MemTotal:       16000000 kB
MemAvailable:    8000000 kB
@harness:cgroup
cpu.max 400000 100000
cpu.max max 100000
memory 8589934592 7516192768 1073741824 2147483648
memory 9223372036854771712 99999999999 1
@harness:net_dev
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets
    lo:   49194     237    0    0    0     0          0         0    49194     237
enp3s0: 244476061    5782    0    0    0     0          0         0   321957    3463
docker0:       0       0    0    0    0     0          0         0        0       0
@harness:addresses
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: enp3s0    inet 129.97.92.168/24 brd 129.97.92.255 scope global enp3s0\\       valid_lft forever
2: enp3s0    inet6 fe80::1/64 scope link \\       valid_lft forever preferred_lft forever
3: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\\       valid_lft forever
@harness:links
1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN mode DEFAULT
2: enp3s0: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP mode DEFAULT
3: docker0: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc noqueue state DOWN
@harness:net_sys
docker0 virtual 4294967295 unknown
enp3s0 physical 10000 full
@harness:own_name
127.0.1.1       ecetesla0
@harness:routes
local 129.97.92.168 dev lo src 129.97.92.168 uid 1000 \\    cache <local>
129.97.92.169 dev enp3s0 src 129.97.92.168 uid 1000 \\    cache
129.97.93.7 via 129.97.92.1 dev enp3s0 src 129.97.92.168 uid 1000 \\    cache
@harness:python
environment /home/ada/.venv
@harness:versions
{"python": "3.11.7", "packages": {"torch": "2.6.0"}, "torch_cuda": "12.4", "harness_hash": "ab"}
@rc=0
@harness:mpirun
mpirun (Open MPI) 4.1.2

Report bugs to http://www.open-mpi.org/community/help/
@rc=0
@harness:end
"""


def test_every_fact_of_a_full_probe_is_read():
    facts = parse_facts(TEXT)
    assert (facts.hostname, facts.user, facts.shell) == ("ecetesla0", "ada", "/bin/tcsh")
    assert facts.os_name == "Ubuntu 22.04.4 LTS"
    assert facts.cpu_model == "Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz"
    assert (facts.n_cores, facts.quota_cores, facts.usable_cores) == (16, 4.0, 4.0)
    assert facts.load_1min == 0.52
    assert facts.memory_total_bytes == 16_000_000 * 1024
    assert facts.usable_memory_bytes == 8 * 2**30
    assert facts.memory_available_bytes == 4 * 2**30
    assert facts.own_addresses == ("127.0.1.1",)
    assert facts.environment == "/home/ada/.venv"
    assert facts.mpi == "Open MPI 4.1.2"
    assert facts.python.torch_cuda == "12.4"


def test_the_interface_that_routes_use_is_the_clusters_not_docker0():
    interface = parse_facts(TEXT).cluster_interface
    assert interface.name == "enp3s0"
    assert interface.speed_mbit_per_s == 10000
    assert interface.mtu_bytes == 9000
    assert parse_facts(TEXT).cluster_address == "129.97.92.168"


def test_an_empty_probe_leaves_everything_unknown():
    facts = parse_facts("")
    assert facts.n_cores is None
    assert facts.usable_memory_bytes is None
    assert facts.cluster_interface is None
    assert facts.python is None


@pytest.mark.parametrize("length", range(0, len(TEXT), 97))
def test_a_probe_cut_off_anywhere_still_parses(length):
    parse_facts(TEXT[:length])


def test_the_tightest_limit_of_all_levels_counts():
    lines = ["cpu.max 50000 100000", "cpu.max 20000 100000", "cpu.max -1 100000", "memory max 9"]
    assert parse_limits(lines) == (0.2, None, None)
    assert parse_limits(["memory 100 90 20 10", "memory 70 5 "]) == (None, 70, 40)
    assert parse_limits(["memory 100", "memory 200 300 50"]) == (None, 100, 0)


def test_a_file_system_counts_once_and_names_may_hold_blanks():
    lines = [
        "Filesystem     1024-blocks     Used Available Capacity Mounted on",
        "//nas/My Share 1000 400 600 40% /mnt/my share",
        "/dev/vda 2000 0 2000 0% /",
        "/dev/vda 2000 0 2000 0% /",
    ]
    assert parse_disks(lines) == (
        Disk(mount="/mnt/my share", free_bytes=614400),
        Disk(mount="/", free_bytes=2048000),
    )


def test_routes_of_iproute2_and_busybox_are_read():
    lines = [
        "10.0.0.3 dev eth0 src 10.0.0.2 uid 0 \\    cache ",
        "10.0.0.4 via 10.0.0.1 dev eth1  src 10.0.0.9 ",
        "local 10.0.0.2 dev lo  src 10.0.0.2 ",
        "RTNETLINK answers: Network is unreachable",
    ]
    assert parse_routes(lines) == (
        PeerRoute(address="10.0.0.3", interface="eth0", source="10.0.0.2"),
        PeerRoute(address="10.0.0.4", interface="eth1", source="10.0.0.9"),
        PeerRoute(address="10.0.0.2", interface="lo", source="10.0.0.2", is_local=True),
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpirun (Open MPI) 5.0.3\n@rc=0", "Open MPI 5.0.3"),
        ("HYDRA build details:\n    Version:      4.2.1\n@rc=0", "MPICH 4.2.1"),
        ("error while loading shared libraries\n@rc=127", ""),
    ],
)
def test_mpi_implementations_are_told_apart(text, name):
    assert parse_mpi(split_sections(f"@harness:mpirun\n{text}")["mpirun"]) == name


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ImportError: no bz2\n\n  <no Python frame>\n@rc=1", "ImportError: no bz2"),
        ("Killed\n@rc=137", "Killed"),
        ("@rc=0", ""),
    ],
)
def test_a_python_that_fails_is_explained_by_its_error(text, error):
    assert parse_python(split_sections(f"@harness:versions\n{text}")["versions"]) == (None, error)

"""From facts to verdicts, one broken thing at a time."""

import dataclasses

import pytest

from harness.domain.hostfile import Host
from harness.errors import ConfigError
from harness.nodes.between import Connection, Reduction
from harness.nodes.checks import CHECKS, judge_all, select
from harness.nodes.facts import Disk, PeerRoute, PythonFacts, Status, worst
from harness.nodes.mpi import Hello
from harness.nodes.probe import ProbedClock
from harness.nodes.ssh import Login

GIB = 2**30


def with_nic(cluster, index, **changes):
    lo, eth0, docker0 = cluster.reports[index].facts.interfaces
    return cluster.facts(index, interfaces=(lo, dataclasses.replace(eth0, **changes), docker0))


def test_a_healthy_cluster_is_ok_in_every_check(hosts, full_mesh):
    names = ("n0", "n1", "n2")
    survey = hosts(3).survey(
        pairs=full_mesh(3),
        hello=Hello(hosts=names, names=names, duration_s=2.0),
        reduction=Reduction(hosts=names, backend="gloo", errors={}, left_out={}, duration_s=0.01),
    )
    findings = judge_all(survey, CHECKS)
    assert [f for f in findings if f.status is not Status.OK] == []
    assert [f.check for f in findings if f.host == "n0"] == list(CHECKS)


def test_critical_outweighs_unknown_outweighs_warn():
    assert worst([Status.OK, Status.UNKNOWN, Status.WARN]) is Status.UNKNOWN
    assert worst([Status.UNKNOWN, Status.CRITICAL]) is Status.CRITICAL
    assert worst([]) is Status.OK


def test_a_name_without_address_stops_the_host_with_one_finding(hosts):
    cluster = hosts(2).fail_login(
        1, Login.UNTRIED, addresses=(), resolve_error="Name or service not known"
    )
    findings = [f for f in judge_all(cluster.survey(), CHECKS) if f.host == "n1"]
    assert findings[0].status is Status.CRITICAL
    assert findings[0].detail == "n1 has no address: Name or service not known"
    assert "/etc/hosts" in findings[0].remedy
    assert all(f.status is Status.UNKNOWN and f.follows for f in findings[1:])
    assert len(findings) == len(CHECKS)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("10.0.0.2 port 22: Connection refused",
         "at n1's console: sudo systemctl enable --now ssh"),
        ("10.0.0.2 port 22: No route to host", "switch n1 on, and check its cable and its address"),
        ("10.0.0.2 port 22: no answer in 20 s", "switch n1 on, or open port 22 in its firewall"),
    ],
)  # fmt: skip
def test_each_shut_port_has_its_remedy(hosts, error, remedy):
    cluster = hosts(2).fail_login(1, Login.UNTRIED, is_port_open=False, port_error=error)
    (finding,) = cluster.judge("port", 1)
    assert (finding.status, finding.detail, finding.remedy) == (Status.CRITICAL, error, remedy)


@pytest.mark.parametrize(
    ("login", "detail", "remedy"),
    [
        (Login.UNKNOWN_KEY, "its host key is not known here", "ssh n1 true, and answer yes if "),
        (Login.CHANGED_KEY, "not the one known here", "ssh-keygen -R k && ssh n1 true, and answer"),
        (Login.DENIED, "asks for more than a key", "ssh-copy-id n1"),
        (Login.DENIED, "asks for more than a key", "if your key has a passphrase: ssh-add"),
        (Login.KEY_FILE_OPEN, "others may read", "chmod 600"),
        (Login.TIMED_OUT, "hangs: no login", "sudo systemctl restart ssh"),
        (Login.CLOSED, "closes the connection", "journalctl -u ssh"),
        (Login.NO_SHELL, "gives no shell", "chsh -s /bin/bash ada"),
        (Login.FAILED, "ssh fails: so it is", "ssh -v n1 true"),
    ],
)
def test_each_failed_login_has_its_remedy(hosts, login, detail, remedy):
    cluster = hosts(2).fail_login(1, login, login_detail="so it is", outdated_key="-R k")
    (finding,) = cluster.judge("login", 1)
    assert finding.status is Status.CRITICAL
    assert detail in finding.detail
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("login", "remedy"),
    [
        (Login.UNKNOWN_KEY, "ssh -p 2200 ada@jump true, and answer yes if "),
        (Login.CHANGED_KEY, "ssh-keygen -R k && ssh -p 2200 ada@jump true, and answer yes if "),
        (Login.DENIED, "ssh-copy-id -p 2200 ada@jump (first "),
    ],
)
def test_a_jump_host_that_refuses_is_named(hosts, login, remedy):
    cluster = hosts(2).fail_login(1, login, failed_jump="-p 2200 ada@jump", outdated_key="-R k")
    (finding,) = cluster.judge("login", 1)
    assert finding.detail.startswith("at its jump host (ssh -p 2200 ada@jump): ")
    assert remedy in finding.remedy


def test_only_a_port_that_was_tried_is_called_open(hosts):
    for is_port_open in (True, False):
        changes = {"is_port_open": is_port_open, "banner": ""}
        (finding,) = hosts(2).fail_login(1, Login.TIMED_OUT, **changes).judge("login", 1)
        assert ("the port is open" in finding.detail) == is_port_open


def test_localhost_among_other_hosts_is_to_be_written_by_its_name(hosts):
    cluster = hosts(2).probe(1, addresses=("127.0.0.1",)).facts(1, hostname="ecetesla1")
    (finding,) = cluster.judge("resolve", 1)
    assert finding.status is Status.WARN
    assert finding.remedy.startswith("write ecetesla1 instead of n1 into the hostfile")


def test_this_machines_own_name_may_be_a_loopback_address_here(hosts):
    (finding,) = hosts(2).probe(1, addresses=("127.0.1.1",)).judge("resolve", 1)
    assert (finding.status, finding.detail) == (Status.OK, "127.0.1.1")


def test_a_hang_behind_the_login_is_located_and_keeps_earlier_facts(hosts):
    text = "@harness:hostname\nn1\n@harness:shell\n@harness:cpus_allowed\n@harness:disk"
    cluster = hosts(2).probe(1, is_complete=False, text=text)
    assert "hung at disk" in cluster.judge("login", 1)[0].detail
    assert cluster.judge("shell", 1)[0].status is Status.OK
    (nic,) = cluster.judge("nic", 1)
    assert (nic.status, nic.follows) == (Status.UNKNOWN, True)
    assert cluster.judge("tcp", 1)[0].status is Status.UNKNOWN


def test_a_csh_is_a_warning_with_the_command_that_changes_it(hosts):
    (finding,) = hosts(1).facts(0, shell="/bin/tcsh").judge("shell", 0)
    assert finding.status is Status.WARN
    assert finding.remedy == "bash setup/change_shell.sh my.txt --apply"


@pytest.mark.parametrize(
    ("offset_s", "error_s", "status"),
    [
        (0.05, 0.001, Status.OK),
        (-0.2, 0.001, Status.WARN),
        (0.2, 0.15, Status.OK),  # may be 50 ms only
        (0.7, 0.5, Status.WARN),
        (-7.0, 0.001, Status.CRITICAL),
        (5.2, 0.3, Status.WARN),
    ],
)
def test_a_clock_counts_as_wrong_beyond_the_error_of_the_look(hosts, offset_s, error_s, status):
    cluster = hosts(1).probe(0, clock=ProbedClock(offset_s=offset_s, error_s=error_s))
    assert cluster.judge("clock", 0)[0].status is status


@pytest.mark.parametrize(
    ("check", "changes", "status", "words"),
    [
        ("os", {"kernel": "Darwin 23.1 arm64"}, Status.CRITICAL, "runs Darwin"),
        ("os", {"kernel": "Linux 6.1 aarch64"}, Status.CRITICAL, "is aarch64, the others are x86"),
        ("os", {"hostname": "n0"}, Status.WARN, "calls itself n0, as n0 does"),
        ("os", {"hostname": "n0", "boot_id": "b"}, Status.CRITICAL, "which is another machine"),
        ("cpu", {"quota_cores": 0.5}, Status.OK, "8 cores, limited to 0.5, AMD EPYC"),
        ("cpu", {"load_1min": 4.1}, Status.WARN, "load 4.1 on 8 cores"),
        ("cpu", {"n_cores": None}, Status.UNKNOWN, "did not report"),
        ("memory", {"memory_available_bytes": GIB}, Status.WARN, "only 1 GiB free"),
        ("memory", {"memory_limit_bytes": 2**28}, Status.CRITICAL, "256 MiB free of 256 MiB"),
        ("disk", {"disks": ()}, Status.UNKNOWN, "df does not answer"),
        ("nic", {"routes": ()}, Status.CRITICAL, "no route to any"),
        ("nic", {"run_interface": "", "run_address": ""}, Status.CRITICAL,
         "no interface by which a run, over IPv4,"),
        ("nic", {"own_addresses": ("127.0.1.1",)}, Status.OK, "its own name is 127.0.1.1 there"),
        ("env", {"environment": ""}, Status.CRITICAL, "no environment at /e"),
        ("env", {"environment": "", "python_home": "/opt/bin"}, Status.CRITICAL,
         "needs the Python in /opt/bin"),
        ("env", {"mpi": ""}, Status.CRITICAL, "lacks mpirun"),
        ("env", {"mpi": "Open MPI 5.0.3"}, Status.CRITICAL, "MPI Open MPI 5.0.3, while 2 of 3"),
        ("env", {"python": None, "python_error": "Killed"}, Status.CRITICAL,
         "its Python fails: Killed"),
    ],
)  # fmt: skip
def test_each_broken_fact_has_its_verdict(hosts, check, changes, status, words):
    cluster = hosts(3).facts(2, **changes)
    (finding,) = cluster.judge(check, 2)
    assert finding.status is status
    assert words in finding.detail
    assert bool(finding.remedy) is (status is not Status.OK)
    assert cluster.judge(check, 1)[0].status is Status.OK


@pytest.mark.parametrize(
    ("mount", "free_bytes", "status"),
    [
        ("/", 50 * 2**20, Status.CRITICAL),
        ("/tmp", GIB // 2, Status.WARN),
        ("/tmp", 2 * GIB, Status.OK),
        ("/dev/shm", 64 * 2**20, Status.WARN),
        ("/dev/shm", GIB // 2, Status.OK),
    ],
)
def test_full_disks_are_found(hosts, mount, free_bytes, status):
    disk = Disk(mount=mount, free_bytes=free_bytes)
    assert hosts(1).facts(0, disks=(disk,)).judge("disk", 0)[0].status is status


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speed_mbit_per_s": 100}, "eth0 runs at 100 Mbit/s, others 1000"),
        ({"kind": "wireless"}, "eth0 is wireless"),
        ({"duplex": "half"}, "eth0 runs half duplex"),
        ({"mtu_bytes": 9000}, "MTU of 9000 B, most others 1500 B"),
    ],
)
def test_a_slow_or_odd_interface_is_a_warning(hosts, changes, words):
    cluster = with_nic(hosts(3), 1, **changes)
    (finding,) = cluster.judge("nic", 1)
    assert finding.status is Status.WARN
    assert words in finding.detail
    assert cluster.judge("nic", 0)[0].status is Status.OK


def test_one_machine_under_two_names_has_no_other_to_reach(hosts):
    cluster = hosts(2).facts(0, routes=()).facts(1, routes=(), hostname="n0")
    assert {cluster.judge("nic", index)[0].status for index in (0, 1)} == {Status.OK}
    assert {cluster.judge("os", index)[0].status for index in (0, 1)} == {Status.WARN}


def test_docker0_is_named_as_not_used(hosts):
    detail = hosts(2).judge("nic", 0)[0].detail
    assert detail == "eth0 10.0.0.1, 1000 Mbit/s; not used: docker0"


def test_routes_over_two_interfaces_are_a_warning(hosts):
    cluster = hosts(3)
    routes = (
        *cluster.reports[0].facts.routes,
        PeerRoute(address="10.0.0.9", interface="docker0", source="172.17.0.1"),
    )
    (finding,) = cluster.facts(0, routes=routes).judge("nic", 0)
    assert "through docker0 and eth0" in finding.detail


def python_with(torch, version="3.11.7", harness_hash="aaa", **more):
    packages = {"torch": torch, "mpi4py": "4.1.2", "training-harness": "0.1.0", **more}
    return PythonFacts(version=version, packages=packages, harness_hash=harness_hash)


def test_outliers_are_named_against_the_majority(hosts):
    cluster = hosts(4).facts(3, python=python_with("2.12.0"))
    (finding,) = cluster.judge("env", 3)
    assert finding.detail == "torch 2.12.0, while 3 of 4 hosts have 2.13.0"
    assert finding.remedy == "bash setup/sync_env.sh my.txt"
    assert cluster.judge("env", 0)[0].status is Status.OK


def test_a_release_of_torch_that_captures_no_model_is_critical(hosts):
    finding, *_ = hosts(1).facts(0, python=python_with("2.6.0+cu124")).judge("env", 0)
    assert (finding.status, finding.detail[:24]) == (Status.CRITICAL, "torch 2.6.0 is none of 2")
    assert finding.remedy.startswith("bash setup/install.sh, then bash setup/sync_env.sh")


def test_cpu_and_cuda_builds_of_one_torch_release_are_equal(hosts):
    cluster = hosts(2).facts(1, python=python_with("2.13.0+cu130"))
    assert cluster.judge("env", 1)[0].status is Status.OK


def test_another_numpy_is_a_warning_because_a_run_works(hosts):
    newer, older = (python_with("2.13.0", numpy=numpy) for numpy in ("2.4.6", "2.1.0"))
    (finding,) = hosts(2).facts(0, python=newer).facts(1, python=older).judge("env", 1)
    assert finding.status is Status.WARN
    assert finding.detail == "numpy 2.1.0, while 1 of 2 hosts have 2.4.6"


def test_other_source_of_the_harness_is_critical(hosts):
    python = python_with("2.13.0", version="3.11.9", harness_hash="bbb")
    (finding,) = hosts(3).facts(1, python=python).judge("env", 1)
    assert finding.status is Status.CRITICAL
    assert finding.detail == "harness source bbb, while 2 of 3 hosts have aaa"


def test_a_blocked_pair_names_the_host_whose_firewall_shuts_all_out(hosts, full_mesh):
    shut = Connection(error="timeout", detail="10.0.0.3")
    pairs = full_mesh(3, n0_n2=shut, n1_n2=shut)
    (finding,) = hosts(3).judge("tcp", 0, pairs=pairs)
    assert finding.detail == "reaches 1 of 2; not n2 (no answer: 10.0.0.3)"
    assert "in the firewall of n2" in finding.remedy
    assert hosts(3).judge("tcp", 2, pairs=pairs)[0].status is Status.OK


def test_of_two_hosts_the_one_that_does_not_answer_is_blamed(hosts, full_mesh):
    pairs = full_mesh(2, n0_n1=Connection(error="timeout", detail="10.0.0.2"))
    assert "in the firewall of n1" in hosts(2).judge("tcp", 0, pairs=pairs)[0].remedy


def test_one_way_that_fails_blames_the_source(hosts, full_mesh):
    pairs = full_mesh(3, n0_n2=Connection(error="timeout", detail="10.0.0.3"))
    assert "in the firewall of n0" in hosts(3).judge("tcp", 0, pairs=pairs)[0].remedy


def test_an_address_of_runs_that_leads_nowhere_names_the_settings_to_write(hosts, full_mesh):
    dead = Connection(error="interface", detail="10.1.0.2: No route to host")
    cluster = hosts(2).facts(0, run_interface="ib0", run_address="10.1.0.1")
    (finding,) = cluster.judge("tcp", 0, pairs=full_mesh(2, n0_n1=dead))
    assert "not n1 (no answer at the address that runs take: 10.1.0.2: No" in finding.detail
    assert finding.remedy.startswith("repair the network of ib0; or, if it is to lead nowhere, ")
    assert "into hosts/n0.env, each on a line, GLOO_SOCKET_IFNAME=eth0, NCCL_" in finding.remedy


def test_another_machine_behind_a_name_is_found(hosts, full_mesh):
    pairs = full_mesh(3, n0_n1=Connection(error="impostor", detail="10.0.0.3 is n2"))
    (finding,) = hosts(3).judge("tcp", 0, pairs=pairs)
    assert "n1 (another machine answers: 10.0.0.3 is n2)" in finding.detail
    assert finding.remedy == "ssh n0 getent hosts n1; correct its /etc/hosts"


def test_a_host_without_python_is_unknown_in_tcp(hosts, full_mesh):
    pairs = full_mesh(2)
    pairs.silent["n1"] = "sh: python3: not found"
    assert hosts(2).judge("tcp", 1, pairs=pairs)[0].status is Status.UNKNOWN


def test_checks_between_hosts_name_who_is_missing(hosts):
    cluster = hosts(3).fail_login(1, Login.DENIED)
    hello = Hello(hosts=("n0", "n2"), names=("n0", "n2"), duration_s=1.0)
    (finding,) = cluster.judge("mpi", 0, hello=hello)
    assert finding.status is Status.OK
    assert finding.detail == "2 ranks on 2 hosts started and ended in 1 s; without n1"


def test_a_late_host_is_unknown_between_hosts_and_told_so(hosts):
    cluster = hosts(2).probe(1, duration_s=12.0)
    (finding,) = cluster.judge("mpi", 1, late=("n1",))
    assert finding.status is Status.UNKNOWN
    assert finding.remedy == "raise --timeout above 24"


def test_an_mpi_of_another_kind_shows_as_a_job_of_one(hosts):
    hello = Hello(hosts=("n0", "n1"), names=("n0",))
    (finding,) = hosts(2).judge("mpi", 0, hello=hello)
    assert finding.status is Status.CRITICAL
    assert "1 rank(s), 2 were asked for" in finding.detail


def test_a_rank_on_another_machine_is_critical_for_the_host_that_missed_it(hosts):
    hello = Hello(hosts=("n0", "n1"), names=("n0", "n0"))
    cluster = hosts(2)
    assert cluster.judge("mpi", 0, hello=hello)[0].status is Status.OK
    assert "no rank ran on n1" in cluster.judge("mpi", 1, hello=hello)[0].detail


def test_a_job_that_needs_a_networks_name_is_a_warning_with_the_flags(hosts):
    hello = Hello(hosts=("n0", "n1"), names=("n0", "n1"), network="10.0.0.0/24")
    (finding,) = hosts(2).judge("mpi", 0, hello=hello)
    assert finding.status is Status.WARN
    flags = "--mca btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24"
    assert f"mpirun {flags} " in finding.remedy


def test_a_line_without_slots_is_a_warning_with_the_line_to_write(hosts):
    hello = Hello(hosts=("n0", "n1"), names=("n0", "n1"))
    cluster = hosts(2).probe(1, host=Host("n1"))
    assert [f.status for f in cluster.judge("mpi", 0, hello=hello)] == [Status.OK]
    finding = cluster.judge("mpi", 1, hello=hello)[0]
    assert finding.status is Status.WARN
    assert finding.remedy == "write `n1 slots=1` in the hostfile"


def test_a_failing_job_is_pinned_on_the_host_that_fails_alone(hosts):
    culprits = {"n1": "orted: command not found"}
    hello = Hello(hosts=("n0", "n1"), error="ORTE was unable", culprits=culprits)
    cluster = hosts(2)
    assert cluster.judge("mpi", 1, hello=hello)[0].status is Status.CRITICAL
    (other,) = cluster.judge("mpi", 0, hello=hello)
    assert (other.status, other.detail) == (
        Status.UNKNOWN,
        "one rank starts, but the whole job fails on n1",
    )


def test_a_job_that_fails_on_no_host_alone_is_one_finding_whose_remedy_communicates(hosts):
    cluster = hosts(2)
    hello = Hello(hosts=("n0", "n1"), error="no end within 60 s")
    (one,), (other,) = (cluster.judge("mpi", k, hello=hello) for k in (0, 1))
    assert (one.detail, one.remedy) == (other.detail, other.remedy)
    assert "TCP ports" in one.remedy
    assert "-m mpi4py.bench helloworld" in one.remedy


def test_a_wrong_sum_is_critical_there_and_a_warning_elsewhere(hosts):
    reduction = Reduction(
        hosts=("n0", "n1"), backend="gloo", errors={"n1": "the sum is wrong"}, left_out={}
    )
    cluster = hosts(2)
    (bad,) = cluster.judge("allreduce", 1, reduction=reduction)
    assert bad.status is Status.CRITICAL
    assert "GLOO_SOCKET_IFNAME=eth0" in bad.remedy
    assert cluster.judge("allreduce", 0, reduction=reduction)[0].status is Status.WARN


def test_checks_are_chosen_by_name_in_the_tables_order():
    assert select(["tcp", "login"], []) == ["login", "tcp"]
    assert "mpi" not in select([], ["mpi"])
    with pytest.raises(ConfigError, match="no check 'gpus': choose from resolve, port"):
        select(["gpus"], [])
    with pytest.raises(ConfigError, match="leave no check"):
        select(["mpi"], ["mpi"])

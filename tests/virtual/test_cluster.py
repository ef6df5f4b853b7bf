"""Real virtual clusters: their nodes are apart, limited as asked, and leave nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import write_program
from waiting import wait_until

from harness.virtual import limits

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

MIB = 2**20


@pytest.fixture(scope="module")
def cluster(new_cluster):
    """Three unlike nodes; node 1 has half of node 0's cores, node 2 a quarter of its link."""
    made = new_cluster()
    made.up(
        *("--nodes", "3", "--bandwidth", "200mbit,200mbit,50mbit"),
        *("--cpu", "1,0.5,0.2", "--memory", "512MiB"),
    )
    return made


def _condition(cluster, node):
    return json.loads(cluster("status", "--json").stdout)[node]["condition"]


def test_every_node_has_its_own_host_name_and_address(cluster):
    seen = [
        cluster.on(i, "sh", "-c", "hostname; ip -4 -br addr show eth0").stdout for i in range(3)
    ]
    described = json.loads(cluster.hostfile.with_suffix(".json").read_text())["nodes"]
    for text, node in zip(seen, described, strict=True):
        assert text.split()[0] == node["name"]
        assert text.split()[-1] == f"{node['address']}/24"
    assert len(set(seen)) == 3


@pytest.mark.parametrize("knows_environment", [True, False])
def test_mpirun_reaches_all_nodes_whatever_path_a_login_has(cluster, tmp_path, knows_environment):
    """On real machines, a login by ssh has the system's PATH."""
    script = '#!/bin/sh\nhost=$1; shift\nexec ssh "$host" "export PATH=/usr/bin:/bin; $*"\n'
    login = write_program(tmp_path / "login", script)
    flags = [] if knows_environment else ["--mca", "plm_rsh_agent", str(login)]
    words = ["mpirun", *flags, "-np", "3", "--hostfile", str(cluster.hostfile), "hostname"]
    done = cluster("run", "--", *words)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [f"{cluster.name}-node{i}" for i in range(3)]


def test_working_directory_exit_code_and_arguments_pass_through(cluster, tmp_path):
    script = 'pwd; printf "<%s>" "$@"; exit 7'
    argv = ["sh", "-c", script, "sh", "a b", "$HOME", "--name", "x'y"]
    done = cluster("run", "--", *argv, cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout == f"{tmp_path}\n<a b><$HOME><--name><x'y>"


def test_nodes_log_in_to_each_other_by_key_alone(cluster):
    target = f"{cluster.name}-node1"
    done = cluster.on(2, "ssh", "-o", "BatchMode=yes", target, "hostname")
    assert done.stdout.strip() == target
    refused = cluster.on(2, "ssh", "-o", "PubkeyAuthentication=no", target, "hostname")
    assert refused.returncode == 255
    assert "Permission denied (publickey)" in refused.stderr


def test_a_host_key_that_is_not_known_is_refused(cluster):
    target = f"{cluster.name}-node1"
    done = cluster.on(0, "ssh", "-o", "GlobalKnownHostsFile=/dev/null", target, "hostname")
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_a_nodes_etc_is_its_own(cluster):
    before = Path("/etc/passwd").read_bytes()
    done = cluster.on(1, "sh", "-c", "echo changed >>/etc/passwd && tail -n 1 /etc/passwd")
    assert done.stdout == "changed\n"
    assert Path("/etc/passwd").read_bytes() == before
    assert cluster.on(0, "tail", "-n", "1", "/etc/passwd").stdout != "changed\n"


def test_a_node_sees_its_own_interfaces_alone(cluster):
    assert cluster.on(0, "ls", "/sys/class/net").stdout.split() == ["eth0", "lo"]


def _iperf_bytes_per_s(cluster, source, target):
    cluster.on(target, "iperf3", "--server", "--daemon", "--one-off")
    address = f"{cluster.name}-node{target}"
    for _ in range(50):  # until the server listens
        words = ["iperf3", "--client", address, "--time", "2", "--json"]
        report = json.loads(cluster.on(source, *words).stdout)
        if "error" not in report:
            return report["end"]["sum_received"]["bits_per_second"] / 8
        time.sleep(0.05)
    raise AssertionError(report["error"])


# TCP's payload is 95% of what a link carries; the first bucket of 128 KiB passes unshaped, 0.3% of
# 2 s at 200 Mbit/s and 1% at 50. Below: the first round trips, and other work on this machine, for
# which the best of some readings counts.
@pytest.mark.alone
@pytest.mark.parametrize(
    ("source", "target", "limit_bytes_per_s"), [(0, 1, 25e6), (0, 2, 6.25e6), (2, 0, 6.25e6)]
)
def test_a_transfer_is_as_fast_as_the_slower_link(cluster, source, target, limit_bytes_per_s):
    best = 0.0
    for _ in range(8):
        best = max(best, _iperf_bytes_per_s(cluster, source, target))
        if best > 0.8 * limit_bytes_per_s:
            break
    assert 0.8 * limit_bytes_per_s < best < 1.01 * limit_bytes_per_s


_BURN = """
import time
begin, used = time.perf_counter(), time.process_time()
while time.perf_counter() - begin < 1.5: pass
print((time.process_time() - used) / (time.perf_counter() - begin))
"""


def test_cpu_quota_holds(cluster):
    share = float(cluster.on(2, sys.executable, "-c", _BURN).stdout)
    # Some periods of start and end more than 20% of 1.5 s; less if others use the cores.
    assert 0 < share < 0.22


def test_going_over_the_memory_limit_kills_and_is_counted(cluster):
    ok = cluster.on(1, sys.executable, "-c", f"bytearray({200 * MIB})")
    assert ok.returncode == 0
    killed = cluster.on(1, sys.executable, "-c", f"bytearray({600 * MIB})")
    assert killed.returncode in (137, -signal.SIGKILL)
    counts = [row["n_oom_kills"] for row in json.loads(cluster("status", "--json").stdout)]
    assert counts == [0, 1, 0]


def test_a_second_cluster_stands_apart(cluster, new_cluster):
    second = new_cluster()
    second.up("--nodes", "2")
    address = json.loads(cluster.hostfile.with_suffix(".json").read_text())["nodes"][0]["address"]
    reach = f"import socket; socket.create_connection(('{address}', 22), 2)"
    assert second.on(0, sys.executable, "-c", reach).returncode == 1
    assert second.on(0, "hostname").stdout.strip() == f"{second.name}-node0"
    assert second("down").returncode == 0
    assert cluster("status").returncode == 0


def test_up_twice_is_refused_with_the_remedy(cluster):
    done = cluster("up", *cluster.up_words("--nodes", "2"))
    assert done.returncode == 2
    assert "is up already: take it down" in done.stderr
    assert cluster("status").returncode == 0


@pytest.mark.alone
def test_latency_is_four_links_in_a_round_trip(new_cluster):
    cluster = new_cluster()
    cluster.up("--nodes", "2", "--latency", "5ms")
    connect = (
        "import socket, time\n"
        "for _ in range(3):\n"  # the first also asks for the address (ARP)
        "    begin = time.perf_counter()\n"
        f"    socket.create_connection(('{cluster.name}-node1', 22))\n"
        "    print(time.perf_counter() - begin)\n"
    )
    durations_s = [float(x) for x in cluster.on(0, sys.executable, "-c", connect).stdout.split()]
    # Above: scheduling on a busy machine, at each of the four hops and both ends.
    assert 0.020 <= min(durations_s[1:]) < 0.030


# By kind: what ssh says, and the states of a process while the fault lasts and afterwards.
FAULTS = {
    "off": ("No route to host|timed out", "Z", "Z"),
    "wrong-key": ("HOST IDENTIFICATION HAS CHANGED", "Z", "Z"),
    "hang": ("timed out", "S", "Z"),
    "cut": ("No route to host|timed out", "S", "S"),
    "freeze": ("timed out", "T", "S"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_look_as_they_do_on_real_nodes_and_heal(cluster, kind):
    target, (message, *states) = f"{cluster.name}-node1", FAULTS[kind]
    login = ["ssh", "-o", "ConnectTimeout=2", target, "hostname"]
    sleeper = subprocess.Popen(cluster.argv("exec", "1", "--", "sleep", "100"))
    stat, found = Path(f"/proc/{sleeper.pid}/stat"), []
    try:
        _wait_for(sleeper.pid, "sleep")
        assert cluster("fault", "1", "--kind", kind).returncode == 0
        assert _condition(cluster, 1) == kind
        found.append(stat.read_text().split()[2])
        broken = cluster.on(0, *login)
        assert broken.returncode == 255
        assert re.search(message, broken.stderr)
        assert cluster("fault", "1", "--kind", "heal").returncode == 0
        found.append(stat.read_text().split()[2])
        assert _condition(cluster, 1) == "up"
        assert cluster.on(0, *login).stdout.strip() == target
        assert found == states
    finally:
        sleeper.kill()
        sleeper.wait()


def _share(cluster, node):
    """The quota of a running node in cores."""
    groups = [path.parent for path in limits.join_files(cluster.name, f"{cluster.name}-node{node}")]
    for group in groups:
        if (group / "cpu.cfs_quota_us").exists():
            quota, period = (group / f"cpu.cfs_{kind}_us" for kind in ("quota", "period"))
            return int(quota.read_text()) / int(period.read_text())
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return int(quota) / int(period)
    raise AssertionError(f"node {node} has no quota")


def test_a_slow_node_has_a_third_of_its_quota_until_it_is_healed(cluster):
    assert _share(cluster, 1) == pytest.approx(0.5, rel=0.01)
    cluster("fault", "1", "--kind", "slow")
    assert _share(cluster, 1) == pytest.approx(0.5 / 3, rel=0.01)
    assert _condition(cluster, 1) == "slow"
    cluster("fault", "1", "--kind", "heal")
    assert _share(cluster, 1) == pytest.approx(0.5, rel=0.01)


def _wait_for(pid, name):
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == f"{name}\n")


def test_an_off_node_says_how_to_start_it(new_cluster):
    cluster = new_cluster()
    cluster.up("--nodes", "1")
    cluster("fault", "0", "--kind", "off")
    done = cluster("run", "--", "true")
    assert done.returncode == 2
    assert "is off" in done.stderr


def test_down_leaves_nothing_though_processes_run(new_cluster):
    cluster = new_cluster()
    cluster.up("--nodes", "2", "--cpu", "0.5", "--memory", "256MiB", "--latency", "1ms")
    assert cluster.traces() != []
    sleeper = subprocess.Popen(cluster.argv("run", "--", "sleep", "60"))
    _wait_for(sleeper.pid, "sleep")
    assert cluster("down").returncode == 0
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert cluster.traces() == []
    assert Path("/run/sshd").is_dir()  # this machine's own sshd may count on it by now


def test_down_twice_is_no_error(new_cluster):
    done = new_cluster()("down")
    assert done.returncode == 0
    assert "nothing to do" in done.stdout


# From before the first key to about when the nodes boot; the state at the kill is not the same
# on every machine, the outcome is.
@pytest.mark.parametrize("delay_s", [0.1, 0.5])
def test_down_clears_what_a_killed_up_left(new_cluster, delay_s):
    cluster = new_cluster()
    words = cluster.up_words("--nodes", "12", "--cpu", "0.1", "--bandwidth", "1gbit")
    child = subprocess.Popen(cluster.argv("up", *words), stdout=subprocess.DEVNULL)
    time.sleep(delay_s)
    child.kill()
    child.wait()
    assert cluster("down").returncode == 0
    assert cluster.traces() == []


def test_down_clears_a_cluster_whose_processes_were_killed(new_cluster):
    cluster = new_cluster()
    cluster.up("--nodes", "2", "--cpu", "0.5")
    pid = int((cluster.state / f"{cluster.name}-node1" / "pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    status = cluster("status")
    assert status.returncode == 1
    assert "dead" in status.stdout
    assert cluster("down").returncode == 0
    assert cluster.traces() == []


def test_replace_builds_over_what_a_crash_left(new_cluster):
    cluster = new_cluster()
    cluster.up("--nodes", "1")
    (cluster.state / "cluster.json").unlink()
    cluster.up("--nodes", "2", "--replace")
    assert cluster("status").returncode == 0
    assert len(cluster.hostfile.read_text().splitlines()) == 2


def test_without_the_right_to_make_namespaces_it_names_the_alternative(new_cluster, tmp_path):
    cluster = new_cluster()
    tmp_path.chmod(0o777)
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1));"
        "from harness.virtual.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    drop_rights = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*drop_rights, sys.executable, "-c", script, root, *cluster.argv("up")[2:]],
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no right to make network namespaces" in done.stderr
    assert "mpirun --oversubscribe -np 5 ./entry.sh" in done.stderr

"""What mpirun starts its daemons by: ssh's arguments and exit code, and which host failed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launching import ROOT, on_virtual_cluster, write_program
from waiting import wait_until

AGENT = ROOT / "setup/launch/ssh"
# Stands in for ssh: prints its arguments one a line, then what its input holds.
FAKE = """#!/bin/bash
if [[ $1 == -G ]]; then
    echo "connecttimeout ${OWN_TIMEOUT:-none}"; echo "serveraliveinterval ${OWN_ALIVE:-0}"; exit
fi
printf '%s\\n' "$@"; cat; printf '%b' "$SAID" >&2
[[ -z $PID_FILE ]] || { echo $$ >"$PID_FILE"; exec sleep 100; }
exit "${CODE:-0}"
"""

LIMITS = ["-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=4"]


@pytest.fixture
def start(tmp_path):
    write_program(tmp_path / "ssh", FAKE)

    def start(*arguments, **variables):
        path = f"{tmp_path}:{os.environ['PATH']}"
        environ = os.environ | {"PATH": path, "SAID": "", **variables}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [str(AGENT), *arguments], env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    return start


def test_arguments_and_input_reach_ssh_as_they_are(start):
    arguments = ["-x", "-p", "22", "h", "a b", "$(touch x)", "c'd", '"', "*"]
    process = start(*arguments)
    out, said = process.communicate("input\n", timeout=30)
    assert out.splitlines() == [*LIMITS, *arguments, "input"]
    assert (process.returncode, said) == (0, "")


def test_a_timeout_of_the_users_own_stays(start):
    out, _ = start("h", OWN_TIMEOUT="40").communicate("", timeout=30)
    assert out.splitlines() == [*LIMITS[2:], "h"]
    out, _ = start("h", OWN_ALIVE="5").communicate("", timeout=30)
    assert out.splitlines() == [*LIMITS[:2], "h"]


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        ("255", "banner\\nssh: connect to host h port 22: Connection refused\\n",
         "ssh failed: ssh: connect to host h port 22: Connection refused"),
        ("255", "@@@@\\nHost key verification failed.\\r\\n@@@@\\n\\n",
         "ssh failed: Host key verification failed."),
        ("255", "ada@jump: Permission denied (publickey).\\nkex_exchange_identification: "
         "Connection closed by remote host\\nConnection closed by UNKNOWN port 65535\\n",
         "ssh failed: ada@jump: Permission denied (publickey)."),
        ("255", "", "ssh failed: it gave no reason, as where a host stops answering"),
        ("127", "sh: orted: not found",
         "the MPI daemon ended with exit code 127: sh: orted: not found"),
    ],
)  # fmt: skip
def test_a_failure_ends_with_host_reason_and_remedy(start, code, said, told):
    process = start("-x", "-l", "me", "h", "orted", CODE=code, SAID=said)
    _, error = process.communicate("", timeout=30)
    assert process.returncode == int(code)
    assert error.splitlines()[-1] == f"error: h: {told}; run: bash setup/check_nodes.sh HOSTFILE"


def test_what_mpirun_stops_ends_at_once_and_without_words(start, tmp_path):
    pid_file = tmp_path / "pid"
    process = start("h", PID_FILE=str(pid_file))
    process.stdin.close()
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert process.stderr.read() == ""
    wait_until(lambda: not Path(f"/proc/{int(pid_file.read_text())}").exists())


@pytest.mark.cluster
def test_a_host_without_sshd_is_named_before_mpiruns_own_words(tmp_path):
    name = f"a{os.getpid()}"

    def cluster(command, *words):
        agent = {"OMPI_MCA_plm_rsh_agent": str(AGENT)}
        return on_virtual_cluster(name, command, *words, timeout_s=120, **agent)

    def launch(*flags):
        hostfile = str(tmp_path / f"virtual-{name}.txt")
        command = ["mpirun", *flags, "-np", "3", "--hostfile", hostfile, "hostname"]
        return cluster("run", "--", *command)

    hosts = [f"{name}-node{i}" for i in range(3)]
    try:
        assert cluster("up", "--nodes", "3", "--hosts-dir", str(tmp_path)).returncode == 0
        tree = launch("--mca", "routed_radix", "1")
        assert sorted(tree.stdout.split()) == hosts, tree.stderr
        pid = Path(f"/run/harness-virtual/{name}/{hosts[1]}/pid").read_text().split()[0]
        os.kill(int(pid), signal.SIGKILL)
        done = launch()
        assert done.returncode != 0
        ours = f"error: {hosts[1]}: ssh failed: ssh: connect to host {hosts[1]} port 22: Conn"
        assert 0 <= done.stderr.index(ours) < done.stderr.index("ORTE was unable")
        assert "run: bash setup/check_nodes.sh HOSTFILE" in done.stderr
    finally:
        cluster("down")

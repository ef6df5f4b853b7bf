"""A node's configuration files, and how its state is read from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from harness.errors import ConfigError, EnvironmentSetupError
from harness.virtual import lifecycle, node, state, system
from harness.virtual.plan import make_plan
from harness.virtual.state import Saved, State


@pytest.fixture
def saved(tmp_path):
    plan = make_plan(n_nodes=2, n_cores=2)
    return Saved(plan=plan, hostfile=tmp_path / "virtual.txt", project=Path("/opt/checkout"))


def test_no_host_name_stands_on_a_loopback_address(saved):
    assert node.hosts_text(saved.plan) == (
        "127.0.0.1\tlocalhost\n10.199.0.1\tnode0\n10.199.0.2\tnode1\n"
    )


def test_hostfile_has_a_slot_for_each_node(saved):
    assert lifecycle.hostfile_text(saved.plan) == "node0 slots=1\nnode1 slots=1\n"


def test_host_keys_are_checked_and_passwords_never_taken():
    client = node.ssh_config_text(Path("/run/x/id"))
    server = node.sshd_config_text(Path("/run/x/authorized"), {"PATH": "/a b:/usr/bin"})
    assert "StrictHostKeyChecking yes\n" in client
    assert "AuthenticationMethods publickey\n" in server
    assert "PasswordAuthentication no\n" in server
    assert 'SetEnv PATH="/a b:/usr/bin"\n' in server


def test_nodes_have_the_projects_environment_in_path(saved):
    assert node.environment(saved.project)["PATH"].startswith("/opt/checkout/.venv/bin:")


def test_description_names_keys_and_holds_none(saved, tmp_path):
    described = lifecycle.describe(State(tmp_path, "virtual"), saved)
    assert described["ssh"] == {
        "identity_file": str(tmp_path / "virtual/ssh/id_ed25519"),
        "known_hosts": str(tmp_path / "virtual/ssh/known_hosts"),
    }


PROC_NET_TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100C70A:1F90 0200C70A:0016 01 00000000:00000000 00:00000000 00000000     0        0 2 1
"""


def test_only_a_listening_socket_counts_as_ready():
    assert node.listens(PROC_NET_TCP, 22)
    assert not node.listens(PROC_NET_TCP, 8080)


def test_state_survives_its_file(saved, tmp_path):
    place = State(tmp_path, "virtual")
    place.directory.mkdir()
    state.save(place, saved)
    assert state.load(place) == saved
    assert state.taken_subnets(tmp_path) == {0}


def test_a_missing_cluster_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="no virtual cluster named second is up: make one with"):
        state.load(State(tmp_path, "second"))


@pytest.mark.parametrize("content", ["", "{}", '{"plan": {}}', "[1]"])
def test_a_damaged_state_file_says_how_to_clear_it(tmp_path, content):
    place = State(tmp_path, "second")
    place.directory.mkdir()
    place.plan_file.write_text(content)
    with pytest.raises(EnvironmentSetupError, match=r"is damaged .* down --name second"):
        state.load(place)
    assert state.taken_subnets(tmp_path) == set()


def test_a_pid_given_again_is_not_the_process_that_had_it(tmp_path):
    path = tmp_path / "pid"
    path.write_text(system.describe(os.getpid()))
    assert system.read_alive(path) == os.getpid()
    started = system.start_time(os.getpid())
    path.write_text(f"{os.getpid()} {started + 1}\n")
    assert system.read_alive(path) is None


@pytest.mark.parametrize("content", ["", "x y", "1", "0 0"])
def test_a_damaged_pid_file_names_no_process(tmp_path, content):
    path = tmp_path / "pid"
    path.write_text(content)
    assert system.read_alive(path) is None


def test_this_process_is_found_by_its_network_namespace():
    assert os.getpid() in system.in_namespaces([Path("/proc/self/ns/net")])
    assert system.in_namespaces([Path("/nowhere")]) == set()


def test_ending_waits_until_a_process_is_gone_though_no_longer_found():
    child = subprocess.Popen(["sleep", "60"])
    answers = iter([{child.pid}])
    assert system.end_all(lambda: next(answers, set())) == 1
    assert system.start_time(child.pid) is None
    assert child.wait() == -signal.SIGKILL

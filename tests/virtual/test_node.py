"""A node's configuration files, and how its state is read from /proc."""

import os
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


def test_host_keys_are_checked_and_passwords_never_taken():
    client = node.ssh_config_text(Path("/run/x/id"))
    server = node.sshd_config_text(Path("/run/x/authorized"), {"PATH": "/a b:/usr/bin"})
    assert "StrictHostKeyChecking yes\n" in client
    assert "AuthenticationMethods publickey\n" in server
    assert "PasswordAuthentication no\n" in server
    assert 'SetEnv PATH="/a b:/usr/bin"\n' in server


def test_description_names_keys_and_holds_none(saved, tmp_path):
    described = lifecycle.describe(State(tmp_path, "virtual"), saved)
    assert described["ssh"] == {
        "identity_file": str(tmp_path / "virtual/ssh/id_ed25519"),
        "known_hosts": str(tmp_path / "virtual/ssh/known_hosts"),
    }


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

"""Names, addresses, limits and files of a virtual cluster, and its relay under a set clock."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ConfigError, EnvironmentSetupError
from harness.virtual import lifecycle, node, state, system
from harness.virtual.limits import Controller, cpu_quota_us, find_controllers, settings
from harness.virtual.plan import NodePlan, check_name, make_plan
from harness.virtual.relay import Direction
from harness.virtual.state import Saved, State


def test_one_value_serves_all_nodes():
    plan = make_plan(
        n_nodes=3, n_cores=2, bandwidth="1gbit", cpu="0.4", memory="2GiB", latency="1ms"
    )
    assert [node.name for node in plan.nodes] == ["node0", "node1", "node2"]
    assert [node.address for node in plan.nodes] == ["10.199.0.1", "10.199.0.2", "10.199.0.3"]
    assert {node.bandwidth_bytes_per_s for node in plan.nodes} == {125e6}
    assert {node.cpu for node in plan.nodes} == {0.4}
    assert {node.memory_bytes for node in plan.nodes} == {2 * 2**30}
    assert {node.latency_s for node in plan.nodes} == {1e-3}


def test_a_list_makes_unlike_nodes():
    plan = make_plan(n_nodes=3, n_cores=2, bandwidth="1gbit,1gbit,100mbit", cpu="0.8,0.4,0.2")
    assert [node.bandwidth_bytes_per_s for node in plan.nodes] == [125e6, 125e6, 12.5e6]
    assert [node.cpu for node in plan.nodes] == [0.8, 0.4, 0.2]


def test_a_second_cluster_has_its_own_names_and_subnet():
    first = make_plan(n_nodes=2, n_cores=2)
    second = make_plan(name="second", n_nodes=2, n_cores=2, taken_subnets={first.subnet_index})
    assert second.subnet == "10.199.1.0/24"
    assert second.nodes[0].name == "second-node0"
    names = [{(node.name, node.address) for node in plan.nodes} for plan in (first, second)]
    assert names[0].isdisjoint(names[1])


def test_the_subnet_of_a_cluster_that_went_is_taken_again():
    assert make_plan(n_nodes=1, n_cores=2, taken_subnets={0, 2}).subnet_index == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"n_nodes": 0}, "--nodes 0 is outside 1 to 250"),
        ({"n_nodes": 251}, "--nodes 251 is outside 1 to 250"),
        ({"cpu": "0.4,0.4"}, "--cpu has 2 values and the cluster 3 nodes"),
        ({"cpu": "3"}, "--cpu 3 is outside 0.01 to 2"),
        ({"cpu": "0"}, "--cpu 0 is outside"),
        ({"cpu": "nan"}, "--cpu 'nan' is not a number of cores"),
        ({"cpu": "fast"}, "--cpu 'fast' is not a number of cores"),
        ({"cpu": "0.4,,0.4"}, "--cpu '' is not a number of cores"),
        ({"bandwidth": "1bit"}, "a link carries 10kbit to 100gbit"),
        ({"bandwidth": "wide"}, "bandwidth 'wide' is not a number"),
        ({"memory": "1MiB"}, "a node needs 32 MiB"),
        ({"latency": "2s"}, "--latency 2s is over 1 s"),
        ({"name": "a b"}, "cluster name 'a b' must be"),
        ({"taken_subnets": range(256)}, "256 virtual clusters stand already"),
    ],
)
def test_bad_flags_get_one_clear_error(flags, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(**{"n_nodes": 3, "n_cores": 2, **flags})


@pytest.mark.parametrize("name", ["", "../up", "a;b", "a.b", "-n", "A", "1st", "a" * 16, "a\n"])
def test_names_that_would_need_quoting_are_refused(name):
    with pytest.raises(ConfigError):
        check_name(name)


def test_version_2_serves_what_it_controls(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io pids")
    mounts = f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n"
    assert find_controllers(mounts) == {"cpu": Controller(tmp_path, 2)}


@pytest.mark.parametrize(
    ("cpu", "quota_and_period"),
    [(0.4, (1_000, 2_500)), (0.36, (1_000, 2_778)), (1.5, (1_500, 1_000)), (0.05, (1_000, 20_000))],
)
def test_the_period_is_the_shortest_whose_quota_the_kernel_takes(cpu, quota_and_period):
    assert cpu_quota_us(cpu) == quota_and_period


def test_settings_of_both_versions():
    node = NodePlan(name="node0", address="10.199.0.1", cpu=0.4, memory_bytes=2**30)
    assert settings(1, node) == {
        "cpu": [("cpu.cfs_period_us", "2500"), ("cpu.cfs_quota_us", "1000")],
        "memory": [
            ("memory.limit_in_bytes", "1073741824"),
            ("memory.memsw.limit_in_bytes", "1073741824"),
        ],
    }
    assert settings(2, node) == {
        "cpu": [("cpu.max", "1000 2500")],
        "memory": [("memory.max", "1073741824"), ("memory.swap.max", "0")],
    }


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
    (tmp_path / "first").mkdir()
    with pytest.raises(ConfigError, match=r"up: give --name of one that is \(first\), or make"):
        state.load(State(tmp_path, "second"))


def test_a_state_that_this_user_may_not_read_is_refused(tmp_path, monkeypatch):
    place = State(tmp_path, "second")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError))
    with pytest.raises(EnvironmentSetupError, match=f"no right to read {tmp_path}: run as root"):
        state.load(place)


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


def test_a_frame_leaves_when_its_latency_is_over():
    direction = Direction(source=3, target=4, latency_s=0.5)
    direction.accept(b"a", now_s=10.0)
    direction.accept(b"b", now_s=10.25)
    assert direction.release(10.4) == []
    assert direction.release(10.5) == [b"a"]
    assert direction.release(10.7) == []
    assert direction.release(11.0) == [b"b"]


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0, 1))
def test_frames_keep_their_order_and_none_is_lost(gaps_s, latency_s):
    direction = Direction(source=3, target=4, latency_s=latency_s)
    now_s, sent, received = 0.0, [], []
    for index, gap_s in enumerate(gaps_s):
        now_s += gap_s
        direction.accept(bytes([index]), now_s)
        sent.append(bytes([index]))
        received += direction.release(now_s)
    received += direction.release(now_s + latency_s)
    assert received == sent

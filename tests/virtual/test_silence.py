"""A host that falls silent ends a launch with its row, and comes back to nothing."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from made_runs import read_results
from waiting import wait_until

from harness.virtual import network, system
from harness.virtual.state import SWITCH, State

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.timeout(280)]

LIMIT_S = 8.0


@pytest.fixture(scope="module")
def cluster(new_cluster):
    made = new_cluster()
    made.up("--nodes", "2", "--bandwidth", "1gbit")
    return made


def state(cluster):
    return State(Path("/run/harness-virtual"), cluster.name)


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def running_on(cluster, node):
    """What the launch runs on a node: all but the node's own sshd."""
    found = system.in_namespaces([state(cluster).namespace(f"{cluster.name}-node{node}")])
    return [pid for pid in found if (words := command(pid)) and b"/sshd -D" not in words]


def cut(cluster):
    network.set_link(state(cluster).namespace(SWITCH), 1, up=False)
    return lambda: network.set_link(state(cluster).namespace(SWITCH), 1, up=True)


def freeze(cluster):
    stopped = running_on(cluster, 1)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    def thaw():
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    return thaw


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (cut, "train --model lenet --strategy ddp --steps 1000000"),
        (freeze, "links --measure collectives --time-budget-s 60"),
    ],
    ids=["cut", "freeze"],
)
def test_a_silent_host_ends_the_launch_and_comes_back_to_nothing(cluster, tmp_path, fault, words):
    argv = ["mpirun", "-np", "2", "--hostfile", str(cluster.hostfile), "./entry.sh", *words.split()]
    limits = ["--heartbeat-timeout-s", str(LIMIT_S), "--results", str(tmp_path)]
    environ = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launch = subprocess.Popen(
        cluster.argv("run", "--", *argv, *limits),
        env={**os.environ, **environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        wait_until(lambda: any(tmp_path.glob("*/rank1.jsonl")) or launch.poll() is not None, 150)
    except AssertionError:
        launch.terminate()
        said = launch.communicate(timeout=30)[1]
        raise AssertionError(f"no row of rank 1: {said}") from None
    assert launch.poll() is None, launch.communicate()[1]
    heal = fault(cluster)
    try:
        _, err = launch.communicate(timeout=LIMIT_S + 60)  # others use this machine
        assert launch.returncode != 0
        (run,) = read_results(tmp_path).runs
        host = f"{cluster.name}-node1"
        assert run.header.status == "timeout"
        assert run.header.reason.startswith(f"rank 1 ({host}): no heartbeat for ")
        assert json.loads((run.path / "run.json").read_text())["status"] == "timeout"
        assert f"error: {run.header.run_id}: timeout: rank 1 ({host}): " in err
        wait_until(lambda: running_on(cluster, 0) == [], 30)
    finally:
        heal()
        launch.kill()
    wait_until(lambda: running_on(cluster, 1) == [], 60)

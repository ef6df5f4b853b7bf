"""The check on real nodes: own network, sshd, host keys, mpirun over ssh. Needs root."""

import json
import os
import subprocess
import sys
import time

import pytest
from launching import ROOT, on_virtual_cluster
from waiting import wait_until

from harness.nodes.checks import CHECKS

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
TIMEOUT_S = 20  # several times what five healthy nodes take, also on a busy machine


class Cluster:
    """Five nodes of the virtual cluster, driven by its command line."""

    def __init__(self, hosts_dir):
        self.name = f"nodes{os.getpid()}"
        self.hostfile = hosts_dir / f"virtual-{self.name}.txt"
        self("up", "--nodes", "5", "--bandwidth", "1gbit", "--hosts-dir", str(hosts_dir))

    def __call__(self, command, *words):
        self._call(command, *words).check_returncode()

    def _call(self, command, *words):
        return on_virtual_cluster(self.name, command, *words, cwd=ROOT, timeout_s=200)

    def node(self, index):
        return f"{self.name}-node{index}"

    def check(self, *flags):
        """The JSON of a check from node 0, and its finding by node and check."""
        done = self._call(
            "run", "--", "bash", str(ROOT / "setup/check_nodes.sh"), str(self.hostfile), "--json",
            "--timeout", f"{TIMEOUT_S}s", "--env", sys.prefix, *flags,
        )  # fmt: skip
        assert done.stdout, done.stderr
        document = json.loads(done.stdout)
        document["exit_code"] = done.returncode
        findings = {
            (index, finding["check"]): finding
            for index, host in enumerate(document["hosts"])
            for finding in host["findings"]
        }
        return document, findings


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    built = Cluster(tmp_path_factory.mktemp("hosts"))
    try:
        yield built
    finally:
        built("down")


def test_five_healthy_nodes_pass_every_check_which_leaves_nothing_on_them(cluster):
    # cpu: the load is this machine's; env: the tree may be edited while the check runs.
    document, found = cluster.check("--skip", "cpu,env")
    assert document["status"] == "OK"
    assert document["exit_code"] == 0
    assert {check for _, check in found} == set(CHECKS) - {"cpu", "env"}
    assert len(document["pairs"]) == 20
    assert sorted(document["mpi"]["names"]) == [cluster.node(i) for i in range(5)]
    assert document["allreduce"]["backend"] == "gloo"
    assert found[3, "nic"]["detail"].startswith("eth0 ")
    wait_until(lambda: programs() == [], 20)  # a rank that imports torch notices the end afterwards


def programs():
    """The check's programs that run anywhere on this machine, which all nodes share."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if "bytes.fromhex" in line]


def test_one_off_one_wrong_key_one_hanging(cluster):
    cluster("fault", "1", "--kind", "off")
    cluster("fault", "3", "--kind", "wrong-key")
    cluster("fault", "4", "--kind", "hang")
    try:
        start_s = time.monotonic()
        document, found = cluster.check("--skip", "cpu,env")
        # The hang costs its timeout and not the others' checks; the rest is starting up.
        assert document["duration_s"] < TIMEOUT_S + 2, time.monotonic() - start_s
    finally:
        for index in ("1", "3", "4"):
            cluster("fault", index, "--kind", "heal")
    assert document["exit_code"] == 2

    assert found[1, "port"]["status"] == "CRITICAL"
    # At once (no route) or after the timeout (no answer), as the kernel still knows its address.
    assert found[1, "port"]["remedy"].startswith(f"switch {cluster.node(1)} on")

    assert found[3, "port"]["status"] == "OK"
    assert "not the one known here" in found[3, "login"]["detail"]
    assert f"ssh-keygen -R {cluster.node(3)}" in found[3, "login"]["remedy"]

    assert found[4, "login"]["status"] == "CRITICAL"
    assert "hangs" in found[4, "login"]["detail"]
    assert "systemctl restart ssh" in found[4, "login"]["remedy"]

    for healthy in (0, 2):
        for check in ("tcp", "mpi", "allreduce"):
            assert found[healthy, check]["status"] == "OK", found[healthy, check]
            missing = ", ".join(cluster.node(i) for i in (1, 3, 4))
            assert f"without {missing}" in found[healthy, check]["detail"]
    for broken in (1, 3, 4):
        assert found[broken, "mpi"]["status"] == "UNKNOWN"


def test_a_pair_that_cannot_talk_is_found_on_both_ends_and_nowhere_else(cluster):
    nodes = json.loads(cluster.hostfile.with_suffix(".json").read_text())["nodes"]
    address = nodes[1]["address"]
    cluster("exec", "2", "--", "ip", "route", "add", "unreachable", f"{address}/32")
    try:
        _, found = cluster.check("--only", "login,tcp")
    finally:
        cluster("exec", "2", "--", "ip", "route", "del", "unreachable", f"{address}/32")
    assert all(found[index, "login"]["status"] == "OK" for index in range(5))
    assert [found[index, "tcp"]["status"] for index in (0, 3, 4)] == ["OK"] * 3
    assert f"reaches 3 of 4; not {cluster.node(2)} (no answer" in found[1, "tcp"]["detail"]
    assert f"reaches 3 of 4; not {cluster.node(1)} (refused" in found[2, "tcp"]["detail"]

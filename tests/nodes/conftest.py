"""Hosts as values: a survey can be built by hand, and judged without any host."""

import dataclasses
from pathlib import Path

import pytest

from harness.domain.hostfile import Host
from harness.nodes import ssh
from harness.nodes.between import Connection, Pairs
from harness.nodes.checks import judge_all
from harness.nodes.facts import Disk, Facts, InterfaceFacts, PeerRoute, PythonFacts
from harness.nodes.probe import Order, Probe, ProbedClock
from harness.nodes.survey import HostReport, Survey

PACKAGES = {"torch": "2.13.0+cpu", "mpi4py": "4.1.2", "training-harness": "0.1.0"}


class Hosts:
    """Builds healthy hosts n0, n1, ... and lets a test break one thing of one of them."""

    def __init__(self, n_hosts):
        names = [f"n{i}" for i in range(n_hosts)]
        self.order = Order(
            peers=tuple(names), env_dir="/e", repo_dir="/r", timeout_s=20, hostfile="my.txt"
        )
        self.reports = [self._report(i, names) for i in range(n_hosts)]

    def _report(self, index, names):
        own = f"10.0.0.{index + 1}"
        facts = Facts(
            hostname=names[index],
            user="ada",
            shell="/bin/bash",
            os_name="Debian GNU/Linux 12 (bookworm)",
            kernel="Linux 6.1.0 x86_64",
            cpu_model="AMD EPYC",
            n_cores=8,
            load_1min=0.1,
            memory_total_bytes=32 * 2**30,
            memory_available_bytes=30 * 2**30,
            disks=(Disk(mount="/", free_bytes=10**11),),
            interfaces=(
                InterfaceFacts(name="lo", networks=("127.0.0.1/8",), mtu_bytes=65536),
                InterfaceFacts(
                    name="eth0",
                    networks=(f"{own}/24",),
                    kind="physical",
                    speed_mbit_per_s=1000,
                    duplex="full",
                    mtu_bytes=1500,
                ),
                InterfaceFacts(name="docker0", networks=("172.17.0.1/16",), mtu_bytes=1500),
            ),
            routes=tuple(
                PeerRoute(address=f"10.0.0.{i + 1}", interface="eth0", source=own)
                for i in range(len(names))
                if i != index
            ),
            own_addresses=(own,),
            run_interface="eth0",
            run_address=own,
            environment="/e",
            python=PythonFacts(version="3.11.7", packages=PACKAGES, harness_hash="aaa"),
            mpi="Open MPI 4.1.8",
        )
        probe = Probe(
            host=Host(names[index], 1),
            target=ssh.Target(hostname=names[index], port=22, user="ada", is_proxied=False),
            addresses=(own,),
            is_port_open=True,
            banner="SSH-2.0-OpenSSH_9.2",
            login=ssh.Login.OK,
            clock=ProbedClock(offset_s=0.001, error_s=0.002),
            is_complete=True,
            duration_s=0.5,
        )
        return HostReport(probe=probe, facts=facts)

    def facts(self, index, **changes):
        report = self.reports[index]
        facts = dataclasses.replace(report.facts, **changes)
        self.reports[index] = dataclasses.replace(report, facts=facts)
        return self

    def probe(self, index, **changes):
        report = self.reports[index]
        probe = dataclasses.replace(report.probe, **changes)
        self.reports[index] = dataclasses.replace(report, probe=probe)
        return self

    def fail_login(self, index, login, **changes):
        return self.probe(index, login=login, is_complete=False, **changes)

    def survey(self, **parts):
        return dataclasses.replace(Survey(order=self.order, reports=tuple(self.reports)), **parts)

    def judge(self, check, index, **parts):
        findings = judge_all(self.survey(**parts), [check])
        return [finding for finding in findings if finding.host == f"n{index}"]


@pytest.fixture
def hosts():
    return Hosts


@pytest.fixture
def full_mesh():
    def build(n_hosts, **broken):
        """All pairs work but those given as n0_n1=Connection(...)."""
        names = [f"n{i}" for i in range(n_hosts)]
        connections = {
            (a, b): broken.get(f"{a}_{b}", Connection(rtt_s=0.0002, detail="10.0.0.1"))
            for a in names
            for b in names
            if a != b
        }
        return Pairs(connections=connections, silent={})

    return build


@pytest.fixture
def smi_xml():
    return lambda name: (Path(__file__).parent / "nvidia_smi" / f"{name}.xml").read_text()

"""Which cgroup files get which values."""

from pathlib import Path

import pytest

from harness.virtual.limits import Controller, cpu_quota_us, find_controllers, settings
from harness.virtual.plan import NodePlan

V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"


def test_version_2_serves_what_it_controls():
    assert find_controllers(V2, v2_controllers="cpuset cpu io pids") == {
        "cpu": Controller("cpu", Path("/sys/fs/cgroup"), 2)
    }


@pytest.mark.parametrize(
    ("cpu", "quota_and_period"),
    [
        (0.4, (1_000, 2_500)),
        (0.36, (1_000, 2_778)),
        (1.5, (1_500, 1_000)),
        (0.05, (1_000, 20_000)),
    ],
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

"""Limits and counters of this process's control group. Standard library only, as the agent is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60


def _files(controller: str, name_v1: str, name_v2: str) -> Iterator[Path]:
    """A control file of this process's cgroup (version 1 or 2), and those of the groups around it.

    A group's limit holds for all groups inside it: Slurm limits a job, not its tasks. In a
    container, the path may be that of the host, and the container's own group is the outermost.
    """
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = _CGROUPS, name_v2
        elif controller in controllers.split(","):
            root, name = _CGROUPS / controller, name_v1
        else:
            continue
        own = root / path.lstrip("/")
        groups = (own, *own.parents)[: len(own.parts) - len(root.parts) + 1]
        yield from (group / name for group in groups if (group / name).exists())


def cpu_quota_s() -> tuple[float, float] | None:
    """Processor seconds that this process's cgroup may use in a period, and the period's seconds;
    None without a quota."""
    found: list[tuple[float, float]] = []
    for file in _files("cpu", "cpu.cfs_quota_us", "cpu.max"):
        quota, *period = file.read_text().split()
        if quota not in ("max", "-1"):
            period_us = period[0] if period else file.with_name("cpu.cfs_period_us").read_text()
            found.append((float(quota) * 1e-6, float(period_us) * 1e-6))
    return min(found, key=lambda limit: limit[0] / limit[1], default=None)


def cgroup_memory_bytes() -> int:
    """The memory limit of this process's cgroup; `UNLIMITED_BYTES` or more without one."""
    files = _files("memory", "memory.limit_in_bytes", "memory.max")
    limits = (file.read_text().strip() for file in files)
    return min((int(limit) for limit in limits if limit != "max"), default=UNLIMITED_BYTES)


def n_oom_kills() -> int:
    """Number of processes of this cgroup that the kernel has killed for memory so far."""
    file = next(_files("memory", "memory.oom_control", "memory.events"), None)
    if file is None:
        return 0
    fields = dict(line.split() for line in file.read_text().splitlines() if len(line.split()) == 2)
    return int(fields.get("oom_kill", 0))

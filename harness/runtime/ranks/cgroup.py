"""Limits and counters of this process's control group. Standard library only, as the agent is."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60


def cgroup_file(controller: str, name_v1: str, name_v2: str) -> Path | None:
    """A control file of this process's cgroup (version 1 or 2), or None."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controller in controllers.split(","):
            file = _CGROUPS / controller / relative / name_v1
        elif controllers == "":
            file = _CGROUPS / relative / name_v2
        else:
            continue
        if file.exists():
            return file
    return None


def cpu_quota_s() -> tuple[float, float] | None:
    """Processor seconds that this process's cgroup may use in a period, and the period's seconds;
    None without a quota."""
    file = cgroup_file("cpu", "cpu.cfs_quota_us", "cpu.max")
    if file is None:
        return None
    if file.name == "cpu.max":
        quota, period = file.read_text().split()
    else:
        quota, period = file.read_text().strip(), file.with_name("cpu.cfs_period_us").read_text()
    return None if quota in ("max", "-1") else (float(quota) * 1e-6, float(period) * 1e-6)


def cgroup_memory_bytes() -> int:
    """The memory limit of this process's cgroup; `UNLIMITED_BYTES` or more without one."""
    file = cgroup_file("memory", "memory.limit_in_bytes", "memory.max")
    text = file.read_text().strip() if file else "max"
    return UNLIMITED_BYTES if text == "max" else int(text)


def n_oom_kills() -> int:
    """Number of processes of this cgroup that the kernel has killed for memory so far."""
    file = cgroup_file("memory", "memory.oom_control", "memory.events")
    if file is None:
        return 0
    fields = dict(line.split() for line in file.read_text().splitlines() if len(line.split()) == 2)
    return int(fields.get("oom_kill", 0))

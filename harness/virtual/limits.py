"""CPU quota and memory limit of a node, by cgroup version 1 or 2."""

import errno
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import EnvironmentSetupError
from harness.virtual.plan import NodePlan

# The kernel's minimum. The smallest quota gives the shortest period, which spreads a share evenly:
# after a wait, a process has a whole quota and runs at full speed until it is used up. With a share
# of 0.36 and a quota of 3.6 ms, bursts of 1 ms of work got up to 0.98 of a core and bursts of 20 ms
# got 0.42; with a quota of 1 ms they get 0.36 to 0.45 and 0.36.
MIN_QUOTA_US = 1_000
MIN_PERIOD_US = 1_000
REMOVE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Controller:
    """The cgroup hierarchy of one kind of limit (`cpu` or `memory`)."""

    root: Path
    version: int


def find_controllers(mounts: str) -> dict[str, Controller]:
    """Find the cpu and memory controllers in the text of /proc/mounts."""
    found: dict[str, Controller] = {}
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        file, names = Path(place) / "cgroup.controllers", list[str]()
        if kind == "cgroup":
            names = options.split(",")
        elif kind == "cgroup2" and file.exists():
            names = file.read_text().split()
        for name in {"cpu", "memory"}.intersection(names):
            found.setdefault(name, Controller(Path(place), 1 if kind == "cgroup" else 2))
    return found


def cpu_quota_us(cpu: float) -> tuple[int, int]:
    """(quota, period) in microseconds for a share of cores, with the shortest possible period."""
    period_us = max(MIN_PERIOD_US, round(MIN_QUOTA_US / cpu))
    return max(MIN_QUOTA_US, round(cpu * period_us)), period_us


def settings(version: int, node: NodePlan) -> dict[str, list[tuple[str, str]]]:
    """The (file, value) pairs to write for a node's limits, by controller, in order."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    if node.cpu is not None:
        quota, period = cpu_quota_us(node.cpu)
        wanted["cpu"] = (
            [("cpu.cfs_period_us", str(period)), ("cpu.cfs_quota_us", str(quota))]
            if version == 1
            else [("cpu.max", f"{quota} {period}")]
        )
    if node.memory_bytes is not None:
        limit = str(node.memory_bytes)
        wanted["memory"] = (
            [("memory.limit_in_bytes", limit), ("memory.memsw.limit_in_bytes", limit)]
            if version == 1
            else [("memory.max", limit), ("memory.swap.max", "0")]
        )
    return wanted


_OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max")  # absent without swap accounting


def group_name(cluster: str, node: str) -> str:
    return f"harness-virtual.{cluster}.{node}"


def _write(path: Path, value: str) -> None:
    if path.name in _OPTIONAL and not path.exists():
        return
    try:
        path.write_text(value)
    except OSError as error:
        raise EnvironmentSetupError(
            f"cannot set {path} to {value}: {error.strerror}; leave --cpu and --memory away, or "
            "run where cgroups may be written"
        ) from None


def _controllers() -> dict[str, Controller]:
    return find_controllers(Path("/proc/mounts").read_text())


def set_limits(cluster: str, node: NodePlan) -> None:
    """Make the node's cgroups with their limits, or change those while its processes run.

    Raises:
        EnvironmentSetupError: a wanted controller is missing or cannot be written.
    """
    available = _controllers()
    for kind in settings(1, node):
        controller = available.get(kind)
        if controller is None:
            raise EnvironmentSetupError(
                f"this machine has no {kind} cgroup controller: leave --{kind} away"
            )
        control = controller.root / "cgroup.subtree_control"  # of version 2
        if control.exists() and kind not in control.read_text().split():
            _write(control, f"+{kind}")
        group = controller.root / group_name(cluster, node.name)
        group.mkdir(exist_ok=True)
        for name, value in settings(controller.version, node)[kind]:
            _write(group / name, value)


def _groups(cluster: str, node: str) -> Iterator[Path]:
    """The existing cgroups of a node (`*`: of all)."""
    for controller in _controllers().values():
        yield from controller.root.glob(group_name(cluster, node))


def join_files(cluster: str, node: str) -> list[Path]:
    """The files into which a process writes its pid to join the node's cgroups."""
    return [group / "cgroup.procs" for group in _groups(cluster, node)]


def join(files: Iterable[Path]) -> None:
    """Move this process, with all that it executes later, into the cgroups of `join_files`."""
    for path in files:
        path.write_text(str(os.getpid()))


def members(cluster: str) -> set[int]:
    return {int(pid) for path in join_files(cluster, "*") for pid in path.read_text().split()}


def remove(cluster: str) -> None:
    """Remove all cgroups of a cluster, whose processes must have ended.

    Raises:
        EnvironmentSetupError: a cgroup still has processes after a few seconds.
    """
    for group in _groups(cluster, "*"):
        _remove_group(group)


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # The kernel keeps a group busy for some milliseconds after its last process has ended.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise EnvironmentSetupError(
                    f"cannot remove cgroup {group}: {error.strerror}"
                ) from None
        time.sleep(0.02)


def n_oom_kills(cluster: str, node: str) -> int:
    """Number of the node's processes that the kernel has killed for exceeding the memory limit."""
    for group in _groups(cluster, node):
        for name in ("memory.oom_control", "memory.events"):
            path = group / name
            if path.exists():
                values = dict(line.split() for line in path.read_text().splitlines())
                return int(values.get("oom_kill", 0))
    return 0

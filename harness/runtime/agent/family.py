"""The processes around an agent: its descendants, and the launcher among its ancestors."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_LAUNCHERS = ("mpirun", "orterun", "mpiexec", "prterun")
# Programs that start the ranks of a host for a launcher, perhaps on another host.
_DAEMONS = (*_LAUNCHERS, "orted", "prted", "hydra_pmi_proxy", "slurmstepd")
_POLL_S = 0.1
# mpirun ends by itself in a second or two, unless it waits for a silent host.
_EXIT_TIMEOUT_S = 5.0


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def name_of(pid: int) -> str:
    """The base name of a process's argv[0]; its executable may have another name."""
    return os.path.basename(_command(pid).partition(b"\0")[0]).decode(errors="replace")


def is_daemon(pid: int) -> bool:
    """Whether a process is a launcher, or its daemon, which ends with it."""
    return name_of(pid) in _DAEMONS


def descendants(pid: int) -> list[int]:
    """All live descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) and stat[0] != "Z":
            children.setdefault(stat[1], []).append(int(entry))
    found, generation = [], [pid]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, [])]
        found += generation
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a process, including stopped ones and new ones.

    Python's resource trackers, which clean up shared memory after the others and end by themselves,
    are killed last.
    """
    for _ in range(20):
        below = descendants(pid)
        others = [each for each in below if b"resource_tracker" not in _command(each)]
        send(others, signal.SIGKILL)
        if not below:
            return
        time.sleep(_POLL_S)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    send(descendants(pid), signal.SIGKILL)


def _launcher_above(pid: int) -> int | None:
    """The nearest ancestor that is a launcher or a daemon of Open MPI."""
    while pid > 1 and (found := _stat(pid)):
        if name_of(pid) in (*_LAUNCHERS, "orted", "prted"):
            return pid
        pid = found[1]
    return None


def _is_running(pid: int, name: str) -> bool:
    return name_of(pid) == name  # a zombie's name is empty


def _has_ended(pid: int, name: str, timeout_s: float) -> bool:
    """Wait for a process to end; return whether it did in time."""
    deadline_s = time.monotonic() + timeout_s
    while _is_running(pid, name):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def end_launcher(silent_hosts: Sequence[str]) -> None:
    """End Open MPI on this host from a new process; returns at once.

    mpirun waits for ever for the daemon of a silent host, and the other daemons wait for mpirun. It
    gives up a host whose ssh has ended.
    """
    pid = _launcher_above(os.getppid())
    if pid is None or os.fork():
        return
    try:
        os.setsid()
        null_fd = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null_fd, fd)
        os.closerange(3, 1024)
        _end_launcher(pid, silent_hosts)
    finally:
        os._exit(0)


def _end_launcher(pid: int, silent_hosts: Sequence[str]) -> None:
    name = name_of(pid)
    timeout_s = _EXIT_TIMEOUT_S
    if name in _LAUNCHERS:
        if silent_hosts:
            named = _connections(pid, silent_hosts).values()
            send(named or _ssh_processes(pid), signal.SIGTERM)
    else:
        timeout_s *= 3  # a daemon ends with its mpirun
    if _has_ended(pid, name, timeout_s):
        return
    connections = _ssh_processes(pid)
    send([pid], signal.SIGKILL)
    send(connections, signal.SIGTERM)


def connections(hosts: Sequence[str]) -> dict[str, int]:
    """The ssh process of each host to which mpirun, if it runs on this host, has one."""
    pid = _launcher_above(os.getppid())
    return {} if pid is None else _connections(pid, hosts)


def is_connected(pid: int) -> bool:
    """Whether an ssh process still runs."""
    return _is_running(pid, "ssh")


def _ssh_processes(pid: int) -> list[int]:
    return [each for each in descendants(pid) if name_of(each) == "ssh"]


def _connections(pid: int, hosts: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in _ssh_processes(pid):
        words = _command(each).decode(errors="replace").split("\0")
        # The short names of those like `user@host.domain`.
        names = {word.rpartition("@")[2].partition(".")[0] for word in words}
        found |= {host: each for host in hosts if host.partition(".")[0] in names}
    return found

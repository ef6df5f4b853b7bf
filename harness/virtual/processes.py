"""Find and kill the processes of a node, identified by namespace or by pid and start time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.errors import EnvironmentSetupError

END_TIMEOUT_S = 10.0


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it has ended (or is a zombie).

    Pid and start time together identify a process; a pid alone may be reused.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def describe(pid: int) -> str:
    """The content of a pid file, for `read_alive`."""
    return f"{pid} {start_time(pid) or 0}\n"


def read_alive(path: Path) -> int | None:
    """The pid in a file written with `describe` if that process still runs, else None."""
    try:
        pid, started = (int(word) for word in path.read_text().split())
    except (OSError, ValueError):
        return None
    return pid if started and start_time(pid) == started else None


def in_namespaces(paths: Iterable[Path]) -> set[int]:
    """The pids of all processes in the network namespaces bound to these files."""
    wanted = set()
    for path in paths:
        if path.exists():
            status = path.stat()
            wanted.add((status.st_dev, status.st_ino))
    pids = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = os.stat(f"/proc/{entry}/ns/net")
            except OSError:
                continue  # it has just ended
            if (status.st_dev, status.st_ino) in wanted:
                pids.add(int(entry))
    return pids


def end_all(find: Callable[[], set[int]]) -> int:
    """Kill the processes that `find` returns until none is left; returns their number.

    Waits until they have ended, because a killed process leaves its namespaces, and thereby the
    result of `find`, before it closes its sockets and frees its port.

    Raises:
        EnvironmentSetupError: a process does not end.
    """
    killed: dict[int, int] = {}
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        found = {pid: start for pid in find() if (start := start_time(pid)) is not None}
        ending = {pid for pid, start in killed.items() if start_time(pid) == start}
        if not found and not ending:
            return len(killed)
        if time.monotonic() > deadline:
            raise EnvironmentSetupError(
                f"processes {sorted(ending | set(found))} do not end after SIGKILL: see their "
                "state in /proc/PID/status"
            )
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        time.sleep(0.02)

"""The processes around an agent: those below it, and the launcher above it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_LAUNCHERS = ("mpirun", "orterun", "mpiexec", "prterun")
# Starts the ranks of its host for a launcher elsewhere.
_DAEMONS = (*_LAUNCHERS, "orted", "prted", "hydra_pmi_proxy", "slurmstepd")
_POLL_S = 0.1
# mpirun ends by itself in a second or two, unless it waits for a host that does not answer.
_PATIENCE_S = 5.0


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process."""
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
    """The program that a process was started as; its file may have another name."""
    return os.path.basename(_command(pid).partition(b"\0")[0]).decode(errors="replace")


def is_daemon(pid: int) -> bool:
    """Whether a process starts ranks for a launcher, and ends with it."""
    return name_of(pid) in _DAEMONS


def descendants(pid: int) -> list[int]:
    """Every process below one that has not ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _stat(int(entry))) and found[0] != "Z":
            children.setdefault(found[1], []).append(int(entry))
    below, at = [], [pid]
    while at:
        at = [child for parent in at for child in children.get(parent, [])]
        below += at
    return below


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def kill_below(pid: int) -> None:
    """Kill every process below one, also those that are stopped or started meanwhile.

    Python's resource trackers, which remove what the others leave in shared memory, end by
    themselves and are killed last.
    """
    for _ in range(20):
        below = descendants(pid)
        others = [one for one in below if b"resource_tracker" not in _command(one)]
        send(others, signal.SIGKILL)
        if not below:
            return
        time.sleep(_POLL_S)
        _reap()
    send(descendants(pid), signal.SIGKILL)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _launcher_above(pid: int) -> int | None:
    """The nearest process of Open MPI's that a process descends from."""
    while pid > 1 and (found := _stat(pid)):
        if name_of(pid) in (*_LAUNCHERS, "orted", "prted"):
            return pid
        pid = found[1]
    return None


def _is_there(pid: int, name: str) -> bool:
    return name_of(pid) == name  # of a zombie it is empty


def _has_ended(pid: int, name: str, patience_s: float) -> bool:
    """Wait until a process has ended, if that is soon."""
    deadline_s = time.monotonic() + patience_s
    while _is_there(pid, name):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def end_launcher(silent_hosts: Sequence[str]) -> None:
    """See to it from a process of its own that Open MPI ends on this host.

    Returns at once. mpirun waits for ever for the daemon of a host that does not answer, and
    daemons wait for such an mpirun; but it gives up a host whose ssh has ended.
    """
    pid = _launcher_above(os.getppid())
    if pid is None or os.fork():
        return
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        os.closerange(3, 1024)
        _end_launcher(pid, silent_hosts)
    finally:
        os._exit(0)


def _end_launcher(pid: int, silent_hosts: Sequence[str]) -> None:
    name = name_of(pid)
    patience_s = _PATIENCE_S
    if name in _LAUNCHERS:
        if silent_hosts:
            send(_connections(pid, silent_hosts), signal.SIGTERM)
    else:
        patience_s *= 3  # a daemon ends with its mpirun
    if _has_ended(pid, name, patience_s):
        return
    connections = _connections(pid, ())
    send([pid], signal.SIGKILL)
    send(connections, signal.SIGTERM)


def _connections(pid: int, hosts: Sequence[str]) -> list[int]:
    """mpirun's ssh to some hosts; all where none is known by these names."""
    found = {one: _command(one) for one in descendants(pid) if name_of(one) == "ssh"}
    wanted = {host.partition(".")[0] for host in hosts}
    named = [
        one
        for one, command in found.items()
        if any(_short(word) in wanted for word in command.decode(errors="replace").split("\0"))
    ]
    return named or list(found)


def _short(word: str) -> str:
    """The short name in `user@host.domain`."""
    return word.rpartition("@")[2].partition(".")[0]

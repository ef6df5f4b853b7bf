"""Why a rank's program ended, and the row of a run whose processes have ended without closing it.

If the program could not connect its agent to the others, another process does so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.measure.heartbeat import HEADER_FILE, RESERVE_FILE, Heartbeat
from harness.runtime.agent import CHANNEL_VARIABLE, CHECK, SEE_OUTPUT
from harness.runtime.agent.peers import Fault
from harness.runtime.ranks.cgroup import UNLIMITED_BYTES, cgroup_memory_bytes, n_oom_kills

# A hanging file server must not keep the launch from ending.
_WRITE_TIMEOUT_S = 10.0


class Deadline(NamedTuple):
    """When this rank's part of a run must be over."""

    at_s: float
    run: str
    is_isolated: bool
    timeout_s: float


def interruption(*, has_begun: bool) -> Fault:
    """Why a launch ended that Ctrl-C or a signal of the launcher has ended."""
    if has_begun:
        return Fault("interrupted", "by Ctrl-C or SIGTERM, --resume runs it again")
    return Fault(
        "crash",
        "stopped by the launcher or by Ctrl-C before the first run began; if not by you, another "
        f"rank could not start: see the launcher's output, and {CHECK}",
    )


class OpenRun:
    """The open run on rank 0: writes its heartbeat, and its final status if nobody else does."""

    def __init__(self, run_dir: Path, now_s: float) -> None:
        self.run_dir = run_dir
        self._start_s = now_s
        self._heartbeat = Heartbeat(run_dir)
        self._heartbeat.__enter__()

    def stop(self) -> None:
        """Stop the heartbeat, because the run's process has closed the row."""
        self._heartbeat.stop()

    def close(self, status: str, reason: str, now_s: float) -> None:
        """Close the row unless it is closed; give up after `_WRITE_TIMEOUT_S` on a hanging disk."""
        arguments = (status, reason, now_s - self._start_s)
        writer = threading.Thread(target=self._write, args=arguments, daemon=True)
        writer.start()
        writer.join(_WRITE_TIMEOUT_S)

    def _write(self, status: str, reason: str, duration_s: float) -> None:
        with contextlib.suppress(OSError, ValueError):
            header = json.loads((self.run_dir / HEADER_FILE).read_bytes())
            if header.get("status") == "running":
                header["status"] = status
                first, *rest = reason.split("\n")
                header["reason"] = "\n".join([f"{first}; {recorded(self.run_dir)}", *rest])
                header["duration_s"] = round(duration_s, 3)
                _replace(self.run_dir, json.dumps(header, indent=1, ensure_ascii=False) + "\n")
        self._heartbeat.stop()


def _replace(run_dir: Path, text: str) -> None:
    """Write the header into its reserved space and rename that file."""
    reserve = run_dir / RESERVE_FILE
    fd = os.open(reserve, os.O_WRONLY | os.O_CREAT, 0o666)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()
        file.flush()
        os.fsync(fd)
    reserve.replace(run_dir / HEADER_FILE)


def recorded(run_dir: Path) -> str:
    """A short description of the ranks' files on this disk."""
    parts = []
    for path in filter(Path.is_file, sorted(run_dir.glob("rank*.jsonl"))):
        data = path.read_bytes()
        n_steps = data.count(b'"kind":"step"')
        parts.append(f"{path.stem} {data.count(10)} records ({n_steps} steps)")
    return f"recorded: {', '.join(parts)}" if parts else "nothing was recorded"


def write_start(argv: Sequence[str], fault: Fault, since_s: float = 0.0) -> Path | None:
    """Write the row of a launch that ends while no run is open; returns its directory, or None if
    it cannot be written or a rank of this host has written one.

    Args:
        argv: the command line of the rank's program.
        since_s: the launch's start (seconds since 1970).
    """
    words = list(argv[argv.index("harness") + 1 :]) if "harness" in argv else None
    if words is None:  # no program of the harness
        return None
    workload = words[0] if words and words[0].isalpha() else "launch"
    flags, host = flags_in(words), os.uname().nodename
    n_bytes = min(cgroup_memory_bytes(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    now_s, stamp = time.time(), "%Y%m%dT%H%M%S"
    run_id = f"{time.strftime(stamp, time.gmtime(now_s))}-{workload}-start"
    device = {"name": f"{host}:0", "kind": "unknown", "memory_bytes": n_bytes}
    first, *rest = fault.reason.split("\n")
    header: dict[str, Any] = {
        "schema": "harness-run", "version": 3, "run_id": run_id, "workload": workload,
        "key": "start", "repeat": 0, "argv": ["./entry.sh", *words], "config": flags,
        "cluster": {"nodes": [{"name": host, "devices": [device]}]}, "ranks": [], "versions": {},
        "commit": "", "status": fault.status, "duration_s": 0.0,
        "reason": "\n".join([f"{first}; no run was open", *rest]),
        "start_utc": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(now_s)),
    }  # fmt: skip
    run_dir = Path(flags.get("results") or "results") / run_id
    try:
        if any(row.stat().st_mtime > since_s for row in run_dir.parent.glob("*-start")):
            return None
        run_dir.mkdir(parents=True)
        _replace(run_dir, json.dumps(header))
    except OSError:
        return None
    return run_dir


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """Flags of the first workload of a command line, with their values as text."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word == "+":
            break
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            found[name] = value
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found


def exit_fault(label: str, code: int, why: str) -> Fault:
    """The fault of a program that exited.

    Args:
        label: the rank and its host.
    """
    reason = f"{label}: its first process ended with exit code {code}: {why}"
    return Fault("crash", reason, exit_code=code or 1)


def fault_of(label: str, code: int, oom_kills_before: int) -> Fault:
    """The fault for a program's exit code, or minus its signal.

    Args:
        oom_kills_before: the cgroup's count when the program started.
    """
    if code >= 0:
        return exit_fault(label, code, SEE_OUTPUT)
    exit_code = 128 - code  # the convention of shells and mpirun
    if -code == signal.SIGKILL and n_oom_kills() > oom_kills_before:
        n_bytes = cgroup_memory_bytes()
        limit = f" of {n_bytes / 2**20:.0f} MiB" if n_bytes < UNLIMITED_BYTES else ""
        reason = f"the kernel killed its first process: the memory limit{limit} was reached"
        return Fault("oom", f"{label}: {reason}", exit_code=exit_code)
    reason = f"its first process was killed by {signal.Signals(-code).name}"
    return Fault("crash", f"{label}: {reason}", exit_code=exit_code)


def start_stand_in(argv: Sequence[str]) -> socket.socket:
    """Start a process that initializes MPI and connects this agent to the others.

    Args:
        argv: the command line of the program that died.

    Returns:
        The agent's end of a channel to the process.
    """
    import subprocess  # takes longer than the agent's other modules

    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, "-m", "harness.runtime.ranks.introduction", *argv],
            env={**os.environ, CHANNEL_VARIABLE: str(its.fileno())},
            pass_fds=[its.fileno()],
            stderr=subprocess.DEVNULL,  # the program's end is the error that matters
        )
    mine.setblocking(False)
    return mine

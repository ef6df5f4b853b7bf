"""The heartbeat of a run that is being written: `<results>/<run_id>/heartbeat`.

The writer touches the file every two seconds and removes it with the last header. If the header
says `running` but the heartbeat has stopped, the writer died. Standard library only, because the
agent of a rank uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness.inputs import open_regular

HEADER_FILE = "run.json"
# Reserved space for the final header, in case the disk is full.
RESERVE_FILE = ".run.json.reserve"
HEARTBEAT_FILE = "heartbeat"


PERIOD_S = 2.0
# A busy file server may delay a few beats.
_N_MISSED = 15


def _process_start(pid: int) -> str:
    """Clock ticks from boot to the start of a process; empty when it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _process_table() -> str:
    """Identify the process table: this boot of this host, and its container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class Heartbeat:
    """Touches the file from a thread, so that a hanging file server does not block the run."""

    def __init__(self, run_dir: Path, period_s: float = PERIOD_S) -> None:
        self._path = run_dir / HEARTBEAT_FILE
        self._period_s = period_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> Heartbeat:
        with contextlib.suppress(OSError):
            self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(is_closed=kind is None)

    def stop(self, *, is_closed: bool = True) -> None:
        """Stop beating; remove the file if the header says how the run ended."""
        self._is_over.set()
        self._thread.join(self._period_s)
        if is_closed:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        writer = {
            "hostname": platform.node(),
            "pid": os.getpid(),
            "start": _process_start(os.getpid()),
            "process_table": _process_table(),
            "period_s": self._period_s,
        }
        self._path.write_text(json.dumps(writer) + "\n")

    def _beat(self) -> None:
        while not self._is_over.wait(self._period_s):
            # A full disk or an unreachable server: the next beat may succeed.
            with contextlib.suppress(OSError):
                try:
                    os.utime(self._path)  # by the file server's clock, if there is one
                except FileNotFoundError:
                    self._write()


def _now_s(directory: Path) -> float:
    """Now, by the clock of the directory's file system, which may be a file server's."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _read(path: Path) -> tuple[float, dict[str, Any]]:
    """Modification time and JSON object; opening the file refreshes a file server's cache."""
    with open_regular(path) as file:
        changed_s = os.fstat(file.fileno()).st_mtime
        try:
            found = json.loads(file.read(4096))
        except (ValueError, RecursionError):
            found = None
    return changed_s, found if isinstance(found, dict) else {}


def _period_s(writer: dict[str, Any]) -> float:
    period_s = writer.get("period_s")
    if isinstance(period_s, int | float) and 0 < period_s < 3600:
        return float(period_s)
    return PERIOD_S


def _is_gone(writer: dict[str, Any]) -> bool:
    """Whether the writer ran on this host and has ended."""
    pid, table = writer.get("pid"), writer.get("process_table")
    if type(pid) is not int or not table or table != _process_table():
        return False
    return _process_start(pid) != writer.get("start")


def find_dead_writer(run_dir: Path) -> str:
    """Why the writer of a run whose header says `running` is dead; empty if it is alive.

    Call it only for such a header. Ages use the file system's clock if the directory is writable,
    because hosts' clocks may differ; it may have been set back since the last beat. Without a
    heartbeat the header's age counts.
    """
    try:
        changed_s, writer = _read(run_dir / HEARTBEAT_FILE)
    except OSError:
        try:
            changed_s, writer = (run_dir / HEADER_FILE).stat().st_mtime, {}
        except OSError:
            return ""
    age_s = _now_s(run_dir) - changed_s
    if not _is_gone(writer) and abs(age_s) < _N_MISSED * _period_s(writer):
        return ""
    host = writer.get("hostname")
    where = f" (rank 0 on {host})" if isinstance(host, str) and host else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(changed_s))
    return f"the process that wrote this run{where} died without closing it; last sign: {when} UTC"

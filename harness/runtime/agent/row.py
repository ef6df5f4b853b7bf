"""Close the row of a run whose processes have ended without doing so."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from harness.measure.heartbeat import HEADER_FILE, RESERVE_FILE, Heartbeat

# A hanging file server must not keep the launch from ending.
_WRITE_TIMEOUT_S = 10.0


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

"""Run system tools; find and kill the processes of a node."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harness.errors import EnvironmentSetupError

# All tools finish at once, because they only change kernel state or write a small file.
TOOL_TIMEOUT_S = 30.0
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}


def run(argv: Sequence[str], *, stdin: str = "") -> str:
    """Run a tool and return its output.

    Raises:
        EnvironmentSetupError: it failed, is missing, or timed out.
    """
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, check=False, timeout=TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentSetupError(f"{' '.join(argv)}: {error}") from None
    if done.returncode != 0:
        message = done.stderr.strip() or done.stdout.strip() or "no message"
        raise EnvironmentSetupError(f"{' '.join(argv)} ended with {done.returncode}: {message}")
    return done.stdout


def in_network(namespace: Path) -> list[str]:
    """A prefix that runs a command line in a network namespace."""
    return ["nsenter", f"--net={namespace}", "--"]


def check_tools() -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
        raise EnvironmentSetupError(
            f"a virtual cluster needs {', '.join(missing)}: run `bash setup/install.sh` as root, "
            f"or `apt-get install {packages}`"
        )


def check_rights() -> None:
    try:
        run(["unshare", "--net", "--uts", "--mount", "--ipc", "true"])
    except EnvironmentSetupError as error:
        raise EnvironmentSetupError(
            f"no right to make network namespaces ({str(error).rsplit(': ', 1)[-1]}): run as root, "
            "or use ranks on this machine alone, `mpirun --oversubscribe -np 5 ./entry.sh`"
        ) from None


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
    bound = [path.stat() for path in paths if path.exists()]
    wanted = {(status.st_dev, status.st_ino) for status in bound}
    pids = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
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

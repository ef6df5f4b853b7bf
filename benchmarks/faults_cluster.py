"""A virtual cluster of three nodes, the target of faults: its system, links and disks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from harness.virtual import state, system
from harness.virtual.state import State

ROOT = Path(__file__).resolve().parents[1]
N_NODES = 3
_OURS = ("-m", "harness")
_AGENT = "harness/runtime/agent"


class Cluster:
    """A virtual cluster that this program builds and removes, with one rank per node."""

    def __init__(self, name: str, directory: Path, n_nodes: int = N_NODES) -> None:
        self.name = name
        self.n_nodes = n_nodes
        self.directory = directory
        self.place = State(state.state_root(), name)
        self.hostfile = directory / f"virtual-{name}.txt"

    def host(self, node: int) -> str:
        return f"{self.name}-node{node}"

    def argv(self, command: str, *words: str) -> list[str]:
        script = str(ROOT / "setup/virtual_cluster.sh")
        return ["bash", script, command, "--name", self.name, *words]

    def call(self, command: str, *words: str) -> None:
        """Run a command of setup/virtual_cluster.sh and wait for it."""
        done = subprocess.run(
            self.argv(command, *words), capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command} {' '.join(words)}: {done.stderr.strip()}")

    def up(self, *flags: str) -> None:
        words = ["--nodes", str(self.n_nodes), "--hosts-dir", str(self.directory), "--replace"]
        self.call("up", *words, *flags)

    def down(self) -> None:
        self.call("down")

    def fault(self, node: int, kind: str) -> None:
        self.call("fault", str(node), "--kind", kind)

    def start(
        self, words: Iterable[str], log: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start mpirun on the first node, in a new process group; its output goes to `log`."""
        mpirun = ["mpirun", "-np", str(self.n_nodes), "--hostfile", str(self.hostfile)]
        mpirun += [word for name in variables for word in ("-x", name)]
        with log.open("wb") as output:
            return subprocess.Popen(
                self.argv("run", "--", *mpirun, "./entry.sh", *words),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
                env=os.environ | variables, start_new_session=True,
            )  # fmt: skip

    def sshd(self, node: int) -> int:
        """The pid of a node's sshd, which may have ended."""
        return int(self.place.pid_file(self.host(node)).read_text().split()[0])

    def pids(self, node: int) -> set[int]:
        """All processes of a node except its sshd."""
        found = system.in_namespaces([self.place.namespace(self.host(node))])
        return found - {self.sshd(node)}

    def first_process(self, rank: int) -> int:
        """A rank's first process, which its agent started, and which starts those of its runs."""
        return self._find(rank, is_agent=False)

    def agent(self, rank: int) -> int:
        """A rank's agent, which mpirun started."""
        return self._find(rank, is_agent=True)

    def _find(self, rank: int, *, is_agent: bool) -> int:
        for pid in sorted(self.pids(rank)):
            with contextlib.suppress(psutil.Error):
                words = psutil.Process(pid).cmdline()
                is_found = any(_AGENT in word for word in words) == is_agent
                if all(word in words for word in _OURS) and is_found:
                    return pid
        raise RuntimeError(f"rank {rank} has no {'agent' if is_agent else 'first process'}")

    def training_process(self, rank: int) -> int:
        """A rank's process for the current run, made by the fork server of its first process."""
        first = psutil.Process(self.first_process(rank))
        for child in first.children():
            for grandchild in child.children():
                return int(grandchild.pid)
        raise RuntimeError(f"rank {rank} has no training process")

    def describe(self, pids: Iterable[int]) -> list[str]:
        """Descriptions of system, except sessions of sshd and processes that have ended."""
        words = []
        for pid in sorted(pids):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                is_ours = not process.name().startswith("sshd")
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    words.append(f"{process.name()} ({' '.join(process.cmdline()[:4])})"[:100])
        return words

    def in_node(self, node: int, *words: str) -> None:
        """Run a command in a node's mount namespace, so that its mounts are visible only there."""
        command = ["nsenter", f"--target={self.sshd(node)}", "--mount", "--", *words]
        subprocess.run(command, check=True, timeout=60, capture_output=True)

    def seen_by(self, node: int, path: Path) -> Path:
        """A path by which this machine reads a node's file."""
        return Path(f"/proc/{self.sshd(node)}/root") / path.relative_to("/")


def wait_until_gone(find: Callable[[], object], timeout_s: float) -> float:
    """Wait until a function returns no process; returns the elapsed seconds, or inf."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < timeout_s:
        if not find():
            return time.monotonic() - start_s
        time.sleep(0.2)
    return float("inf")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a launch."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

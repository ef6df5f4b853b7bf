"""Programs of several ranks as mpirun starts them, and stand-ins, for tests of several packages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MPIRUN = Path(sys.executable).with_name("mpirun")
# A program whose ranks are all aborted if one of them raises.
PROGRAM = (sys.executable, "-m", "mpi4py")
NEEDS_MPIRUN = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIRUN.exists(), reason="setup/install.sh has not installed mpirun"),
]


def completed(
    *words: object, cwd: Path | None = None, timeout_s: float = 60, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in this environment with more variables."""
    return subprocess.run(
        list(map(str, words)), env={**os.environ, **environ}, cwd=cwd,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def turkish(directory: Path) -> dict[str, str]:
    """Variables of a Turkish session, in which I and i are not of A to Z and a to z; skips the test
    if its locale cannot be made in the directory."""
    made = directory / "tr_TR.UTF-8"
    if shutil.which("localedef") is not None:
        completed("localedef", "--no-archive", "-i", "tr_TR", "-f", "UTF-8", made)
    if not made.exists():
        pytest.skip("this system has no sources of locales")
    return {"LOCPATH": str(directory), "LC_ALL": made.name}


def on_virtual_cluster(
    name: str, command: str, *words: object, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command of setup/virtual_cluster.sh to its end."""
    script = ROOT / "setup/virtual_cluster.sh"
    return completed("bash", script, command, "--name", name, *words, **options)


def launch(
    n_ranks: int, *words: object, path: tuple[Path, ...] = (), timeout_s: float = 250
) -> subprocess.CompletedProcess[str]:
    """Run a command on ranks of this machine, which import modules from `path` too."""
    modules = os.pathsep.join(map(str, (ROOT, *path)))
    # A rank that waits in MPI yields its core, as entry.sh lets it.
    environ = {"PYTHONPATH": modules, "OMPI_MCA_mpi_yield_when_idle": "1"}
    command = (MPIRUN, "--oversubscribe", "-np", n_ranks, *words)
    return completed(*command, cwd=ROOT, timeout_s=timeout_s, **environ)


def entry(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the real script, as mpirun starts it."""
    return subprocess.run(
        [str(ROOT / "entry.sh"), *map(str, arguments)],
        # Shells ignore SIGINT in their background jobs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "HARNESS_VENV": sys.prefix, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def write_program(path: Path, script: str) -> Path:
    """Make a program of a script, in a directory that may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return path

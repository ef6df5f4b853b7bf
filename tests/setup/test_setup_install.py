"""What setup/install.sh decides, function by function, with stand-ins for Python and uv."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "setup" / "install.sh"


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def call(tmp_path):
    """Runs a line with the script's functions, on an environment in `tmp_path/.venv`."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        setup = f"source {SCRIPT}; venv={tmp_path}/.venv; stamp=$venv/.installed; {line}"
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", setup],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "PATH": path},
        )

    return run


def test_a_kept_torch_is_pinned_and_installed_around_by_pip_alone(call, tmp_path):
    log = tmp_path / "log"
    _program(tmp_path / "bin" / "uv", f'echo "uv $*" >>{log}')
    _program(
        tmp_path / ".venv/bin/python",
        f"""case $* in
        *torch.__file__*) echo 2.9.0a0+vendor ;;
        *"pip install"*) echo "pip $*" >>{log}
            while [ "$1" != --constraint ]; do shift; done
            grep ^torch= "$2" >>{log} ;;
        esac""",
    )
    done = call("torch=keep; install_packages")
    assert done.returncode == 0, done.stderr
    command, *pins = log.read_text().splitlines()
    assert command.startswith("pip -m pip install")
    assert pins == ["torch==2.9.0a0+vendor"]


def test_a_torch_that_cannot_be_kept_is_refused(call, tmp_path):
    _program(tmp_path / ".venv/bin/python", "exit 1")
    done = call("torch=keep; install_packages")
    assert done.returncode == 2
    assert "can import no torch of the Python that it is made from" in done.stderr

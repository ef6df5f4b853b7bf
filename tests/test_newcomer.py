"""docs/language.md as written: from `pip install transformers` to the report of a small GPT."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def documented_commands():
    text = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    return [textwrap.dedent(block) for block in _BLOCK.findall(text)]


def run(command, directory):
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        ["bash", "-ec", command], cwd=directory, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.mpi
@pytest.mark.timeout(1800)  # a minute, but for other work on the machine
def test_the_documented_commands_lead_to_a_report(tmp_path):
    commands = documented_commands()
    assert len(commands) <= 4
    assert commands[0].strip() == "pip install transformers"
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    entry = tmp_path / "entry.sh"
    entry.write_text(f'#!/bin/sh\nexec {ROOT}/entry.sh "$@"\n')
    entry.chmod(0o755)
    for command in commands[1:]:
        run(command, tmp_path)
    headers = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/run.json")]
    assert {header["status"] for header in headers} == {"ok"}
    # Training makes the measurements that it lacks, once.
    kinds = sorted(header["workload"] for header in headers)
    assert kinds == ["links", "profile", "search", "train", "train", "train"]
    report = (tmp_path / "plots" / "report.html").read_text(encoding="utf-8")
    for named in ("small_gpt:gpt", "single on 1", "ddp on 2", "searched on 2"):
        assert named in report

"""docs/language.md as written: from `pip install transformers` to the report of a small GPT."""

import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from launching import ROOT, completed, write_program
from made_runs import read_results

from harness.domain.cluster import Cluster
from harness.measure.derive.links import collective_table, link_matrices

_BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# What takes most of the minute, cut short: the times of operators, which the training then knows,
# the seconds of the search, and its trial steps.
_ENTRY = f"""#!/bin/sh
exec {ROOT}/entry.sh profile --model small_gpt:gpt --sequence-length 32 --batch-size 8 \\
    --rounds 1 --warm-up 1 --min-samples 1 --time-budget-s 0.001 + \\
    "$@" --trials 1 --search-seconds 1
"""


def documented_commands():
    text = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    return [textwrap.dedent(block) for block in _BLOCK.findall(text)]


def run(command, directory):
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = completed("bash", "-ec", command, cwd=directory, timeout_s=1800, **environ)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def assert_both_transports_are_measured(links, cluster_file):
    """By links, which runs in the ranks' first processes: torch's transfers and MPI's own."""
    assert {matrix.transport for matrix in link_matrices(links)} == {links.header.backend, "mpi"}
    rows = {(row.operation, row.transport, row.n_bytes) for row in collective_table(links)}
    n_sizes = len({n_bytes for *_, n_bytes in rows})
    assert len(rows) == 6 * 2 * n_sizes
    cluster = Cluster.load(cluster_file)
    assert len(cluster.links) == 2
    assert len(cluster.collectives) == len(rows)


@pytest.mark.mpi
@pytest.mark.timeout(1800)  # a minute, but for other work on the machine
def test_the_documented_commands_lead_to_a_report(tmp_path):
    commands = documented_commands()
    assert len(commands) <= 4
    assert commands[0].strip() == "pip install transformers"
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    write_program(tmp_path / "entry.sh", _ENTRY)
    shown = [run(command, tmp_path) for command in commands[1:]]
    results = read_results(tmp_path / "results")
    assert results.skipped == []
    assert {run.header.status for run in results.runs} == {"ok"}
    # Training makes the measurements that it lacks, and takes those that there are.
    runs = sorted(results.runs, key=lambda run: run.header.workload)
    kinds = [run.header.workload for run in runs]
    assert kinds == ["links", "profile", "search", "train", "train", "train"]
    assert_both_transports_are_measured(runs[0], tmp_path / "results" / "cluster.json")
    assert any("all_to_all" in text for text in shown)
    report = (tmp_path / "plots" / "report.html").read_text(encoding="utf-8")
    for named in ("small_gpt:gpt", "single on 1", "ddp on 2", "searched on 2"):
        assert named in report

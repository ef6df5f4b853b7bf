"""Both workloads as they are started: by a real mpirun, on this machine's ranks."""

import subprocess
from pathlib import Path

import pytest

from harness.domain.cluster import Cluster
from harness.measure.derive.devices import summa_table
from harness.measure.derive.links import collective_table, link_matrices
from harness.measure.store import read_results

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = ROOT / ".venv" / "bin" / "mpirun"
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIRUN.exists(), reason="setup/install.sh has not installed mpirun"),
]


def run(n_ranks: int, *words: str) -> str:
    """What a workload printed on standard output."""
    done = subprocess.run(
        [str(MPIRUN), "--oversubscribe", "-np", str(n_ranks), str(ROOT / "entry.sh"), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_links_measures_torch_and_mpi_and_checks_both(tmp_path):
    text = run(
        3, "links", "--results", str(tmp_path), "--sizes", "1KiB", "1MiB", "--pair-sizes", "256KiB",
        "--time-budget-s", "0.01",
    )  # fmt: skip
    assert "all_to_all" in text
    results = read_results(tmp_path)
    assert results.skipped == []
    (one,) = results.runs
    assert one.header.status == "ok"
    backend = one.header.backend
    assert {matrix.transport for matrix in link_matrices(one)} == {backend, "mpi"}
    rows = {(row.operation, row.transport, row.n_bytes) for row in collective_table(one)}
    assert len(rows) == 6 * 2 * 2
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert len(cluster.links) == 6
    assert len(cluster.collectives) == 24


def test_matmul_distributes_over_every_number_of_ranks(tmp_path):
    text = run(
        3, "matmul", "--results", str(tmp_path), "--sizes", "64", "--dtype", "fp32",
        "--time-budget-s", "0.01", "--strong-size", "200", "--weak-size", "100",
    )  # fmt: skip
    assert "of local sum" in text
    (one,) = read_results(tmp_path).runs
    assert one.header.status == "ok"
    assert [(row.scaling, row.n_ranks) for row in summa_table(one)] == [
        (scaling, n) for scaling in ("strong", "weak") for n in (1, 2, 3)
    ]

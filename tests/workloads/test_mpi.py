"""The workload that needs MPI, as it is started: by a real mpirun, on ranks of this machine."""

from launching import ENTRY, NEEDS_MPIRUN, launch

from harness.domain.cluster import Cluster
from harness.measure.derive.links import collective_table, link_matrices
from harness.measure.store import read_results

pytestmark = NEEDS_MPIRUN


def test_links_measures_torch_and_mpi_and_checks_both(tmp_path):
    done = launch(
        3, ENTRY, "links", "--results", tmp_path, "--sizes", "1KiB", "1MiB", "--pair-sizes",
        "256KiB", "--time-budget-s", "0.01",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_to_all" in done.stdout
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

"""Workloads as they are started: by a real mpirun, on ranks of this machine."""

from __future__ import annotations

import json

from launching import ENTRY, NEEDS_MPIRUN, launch
from safetensors.torch import load_file

from harness.domain.cluster import Cluster
from harness.measure.derive.links import collective_table, link_matrices
from harness.measure.store import read_results

pytestmark = NEEDS_MPIRUN
TRAIN = [
    "--model", "lenet", "--strategy", "single", "ddp", "--batch-size", "13", "--n-samples", "35",
    "--steps", "20", "--warm-up", "0", "--no-sync-steps", "2", "--save-model",
]  # fmt: skip


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


def test_ddp_over_mpirun_trains_what_one_device_trains(tmp_path):
    """35 samples in batches of 13: every third batch has 9; two ranks share both unevenly."""
    done = launch(2, ENTRY, "train", *TRAIN, "--results", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    models = {}
    for path in tmp_path.glob("*/run.json"):
        header = json.loads(path.read_text())
        assert header["status"] == "ok", header["reason"]
        models[header["config"]["strategy"]] = load_file(path.with_name("model.safetensors"))
    one, many = models["single"], models["ddp"]
    # fp32 sums in another order: 20 steps of differences of 1e-7 stay far below.
    assert max(float((one[name] - many[name]).abs().max()) for name in one) < 1e-5


def test_out_of_memory_is_a_row_and_the_sweep_goes_on(tmp_path):
    """A batch of 10^6 images of 224 x 224 is 600 GB; the next one fits."""
    flags = ["--model", "resnet18", "--image-size", "224", "--batch-size", "1000000", "4"]
    flags += ["--steps", "1", "--warm-up", "0"]
    done = launch(2, ENTRY, "train", *flags, "--results", tmp_path)
    headers = [json.loads(path.read_text()) for path in tmp_path.glob("*/run.json")]
    assert {h["config"]["batch"]: h["status"] for h in headers} == {1000000: "oom", 4: "ok"}
    assert done.returncode == 0, done.stdout + done.stderr
    assert "oom" in done.stdout

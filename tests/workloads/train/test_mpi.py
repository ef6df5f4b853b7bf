"""Training by the real launcher: entry.sh under mpirun, models compared as written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[3]
MPIRUN = Path(sys.executable).with_name("mpirun")
FLAGS = [
    "--model", "lenet", "--strategy", "single", "ddp", "--batch-size", "13", "--n-samples", "35",
    "--steps", "20", "--warm-up", "0", "--no-sync-steps", "2", "--save-model",
]  # fmt: skip

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun in this environment"),
]


def launch(n_ranks: int, flags: list[str], results: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MPIRUN), "--oversubscribe", "-np", str(n_ranks), str(ROOT / "entry.sh"), "train",
         *flags, "--results", str(results)],
        cwd=ROOT, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip


def test_ddp_over_mpirun_trains_what_one_device_trains(tmp_path):
    """35 samples in batches of 13: every third batch has 9; two ranks share both unevenly."""
    done = launch(2, FLAGS, tmp_path)
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
    done = launch(2, [*flags, "--steps", "1", "--warm-up", "0"], tmp_path)
    headers = [json.loads(path.read_text()) for path in tmp_path.glob("*/run.json")]
    assert {h["config"]["batch"]: h["status"] for h in headers} == {1000000: "oom", 4: "ok"}
    assert done.returncode == 0, done.stdout + done.stderr
    assert "oom" in done.stdout

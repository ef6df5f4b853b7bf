"""The comparison with stock PyTorch runs, and both sides train the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "executor.py"), "--quick", "--json"]

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun in this environment"),
]


def compared(start: list[str]) -> dict[str, dict[str, float]]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*start, *COMMAND], cwd=ROOT, env={**root, **os.environ}, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {comparison["name"]: comparison for comparison in found}


@pytest.mark.parametrize(
    ("start", "names"),
    [
        ([], {"single resnet18: plain PyTorch over executor"}),
        (
            [str(MPIRUN), "--oversubscribe", "-np", "2"],
            {
                "ddp lenet: torch engine over executor",
                "ddp lenet: DistributedDataParallel over executor",
                "pipeline mlp 1f1b: Schedule1F1B over executor",
                "tensor mlp of 1: parallelize_module over executor",
            },
        ),
    ],
)
def test_every_group_of_cases_is_compared(start, names):
    found = compared(start)
    assert set(found) == names
    for comparison in found.values():
        assert comparison["n_pairs"] == 2
        assert comparison["loss_difference"] < 1e-4

"""A rank that dies or hangs in the middle of a step ends the run, and what was measured stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.domain.record import Span
from harness.measure.store import read_results

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
MPIRUN = Path(sys.executable).with_name("mpirun")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun in this environment"),
]

WAITED = "rank 1 waited for the gradient of relu (microbatch 0) from rank 2"


def train(results, fault, **environ):
    """Train on three ranks, of which the last fails; the run."""
    environ = {
        **os.environ,
        **environ,
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "FAULT": fault,
    }
    command = [str(MPIRUN), "--oversubscribe", "-np", "3", sys.executable, "-m", "mpi4py"]
    done = subprocess.run(
        [*command, str(HERE / "faulty_training.py"), str(results)],
        env=environ, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["crash"], done.stderr
    (run,) = [run for run in read_results(results).runs if run.header.workload == "train"]
    return run


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("killed", ["rank 2 (", "killed by SIGKILL", WAITED]),
        ("error", ["rank 2 (", "RuntimeError: rank 2 has a bug (faulty_training.py:"]),
        ("hang", ["did not answer within 20 s", "rank 2 (", ", in forward of step 2; ", WAITED]),
    ],
)
def test_the_reason_names_rank_and_operator(tmp_path, fault, told):
    run = train(tmp_path, fault)
    for words in told:
        assert words in run.header.reason
    assert (WAITED in run.header.reason) == (fault != "error")
    if fault == "hang":
        assert run.header.reason.startswith(f"rank 2 ({os.uname().nodename}): no progress for ")
    assert "gloo/" not in run.header.reason
    # Two steps were finished before the third, in which it happened.
    finished = [r for r in run.ranks[0] if isinstance(r, Span) and r.kind == "step"]
    assert [span.step for span in finished] == [0, 1]


@pytest.mark.parametrize(
    ("fault", "more"), [("hang", ""), ("stopped", "its process is stopped (SIGSTOP or SIGTSTP); ")]
)
def test_ddp_names_the_rank_that_stopped_making_progress(tmp_path, fault, more):
    reason = train(tmp_path, fault, STRATEGY="ddp").header.reason
    assert reason.startswith(f"rank 2 ({os.uname().nodename}): no progress for ")
    assert f" s, in forward of step 2; {more}rank 0 (" in reason
    assert "gloo/" not in reason.splitlines()[0]

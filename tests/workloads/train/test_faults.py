"""A rank that dies or hangs in the middle of a step ends the run, and what was measured stays."""

import os
from pathlib import Path

import pytest
from launching import NEEDS_MPIRUN, PROGRAM, launch

from harness.domain.record import Span
from harness.measure.store import read_results

HERE = Path(__file__).parents[1]

pytestmark = [*NEEDS_MPIRUN, pytest.mark.timeout(900)]

WAITED = "rank 1 waited for the gradient of relu (microbatch 0) from rank 2"
FAULTS = ["pipeline:killed", "pipeline:error", "pipeline:hang", "ddp:stopped"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trainings on three ranks, in one launch, of which the last rank fails; by strategy:fault."""
    results = tmp_path_factory.mktemp("faults")
    program = (*PROGRAM, HERE / "faulty_training.py", results, *FAULTS)
    done = launch(3, *program, path=(HERE.parent, HERE), timeout_s=880)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["crash"] * len(FAULTS), done.stderr
    found = [run for run in read_results(results).runs if run.header.workload == "train"]
    found.sort(key=lambda run: run.header.start_utc)
    return dict(zip(FAULTS, found, strict=True))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", ["rank 2 (", "killed by SIGKILL", WAITED]),
        ("error", ["rank 2 (", "RuntimeError: rank 2 has a bug (faulty_training.py:"]),
        ("hang", ["did not answer within 15 s", "rank 2 (", ", in forward of step 2; ", WAITED]),
    ],
)
def test_the_reason_names_rank_and_operator(runs, fault, words):
    run = runs[f"pipeline:{fault}"]
    for word in words:
        assert word in run.header.reason
    assert (WAITED in run.header.reason) == (fault != "error")
    if fault == "hang":
        assert run.header.reason.startswith(f"rank 2 ({os.uname().nodename}): no progress for ")
    assert "gloo/" not in run.header.reason
    # Two steps were finished before the third, in which it happened.
    finished = [r for r in run.ranks[0] if isinstance(r, Span) and r.kind == "step"]
    assert [span.step for span in finished] == [0, 1]


def test_ddp_names_the_rank_that_stopped_making_progress(runs):
    reason = runs["ddp:stopped"].header.reason
    assert reason.startswith(f"rank 2 ({os.uname().nodename}): no progress for ")
    stopped = "its process is stopped (SIGSTOP or SIGTSTP); "
    assert f" s, in forward of step 2; {stopped}rank 0 (" in reason
    assert "gloo/" not in reason.splitlines()[0]

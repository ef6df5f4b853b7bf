"""A rank that dies or hangs ends its run, and what was measured stays. A training that keeps its
state goes on without the rank, or after the loss of its launch, and trains what one device does."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launching import NEEDS_MPIRUN, PROGRAM, launch
from made_runs import read_results
from safetensors.torch import load_file

from harness.measure.derive.spans import samples_of, spans_of
from harness.measure.store import Run

HERE = Path(__file__).parents[1]

pytestmark = [*NEEDS_MPIRUN, pytest.mark.timeout(900)]

WAITED = "rank 1 waited for the gradient of relu (microbatch 0) from rank 2"
# fp32 sums in another order: six steps of differences of 1e-7 stay far below.
TOLERANCE = 1e-5
N_STEPS = 6
# Case, where its third rank is killed, and the state from which the others go on.
IN_CHANGES = [
    ("to_stages", "vote", "survivors-3"),
    ("to_stages", "commit", "survivors-3"),
    ("to_replicas", "transfer", "step-2"),
    ("replicas", "verify", "survivors-6"),
]
# Trainings that end with their third rank, or go on without it, in the order of the launch.
ENDED = ["pipeline:hang", "ddp:stopped"]
LOST = "lasting:killed"
REJOINED = "replicas:killed"
SURVIVED = ["stages:killed", *(f"{case}:{at}" for case, at, _ in IN_CHANGES)]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Of one launch on three ranks.

    Attributes:
        alone: on one device.
        ended: by case and fault, among them LOST.
        pairs: a run that lost a rank, and the one that goes on.
        rejoined: a run that lost a rank, one without it, and one with it again.
    """

    results: Path
    alone: Run
    ended: dict[str, Run]
    pairs: dict[str, tuple[Run, Run]]
    rejoined: list[Run]


def train(results, n_ranks, *words):
    """Train on so many ranks, of which the third fails; the training runs so far, in order."""
    program = (*PROGRAM, HERE / "faulty_training.py", results, *words)
    done = launch(n_ranks, *program, path=(HERE.parent, HERE), timeout_s=880)
    assert done.returncode == 0, done.stderr
    runs = [run for run in read_results(results).runs if run.header.workload == "train"]
    return sorted(runs, key=lambda run: run.header.start_utc)


def steps_of(run):
    return [r.step for r in spans_of(run.ranks[0]) if r.kind == "step"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    results = tmp_path_factory.mktemp("lost")
    alone, *others = train(results, 3, "single:killed", *ENDED, LOST, *SURVIVED, REJOINED)
    ended = dict(zip((*ENDED, LOST), others, strict=False))
    assert {run.header.status for run in ended.values()} == {"crash"}
    following, rejoined = others[len(ended) : -3], others[-3:]
    pairs = dict(zip(SURVIVED, zip(following[::2], following[1::2], strict=True), strict=True))
    return Runs(results=results, alone=alone, ended=ended, pairs=pairs, rejoined=rejoined)


@pytest.fixture(scope="module")
def one_device(runs):
    """The model after training on one device."""
    return load_file(runs.alone.path / "model.safetensors")


def assert_goes_on(lost, then, state, one_device):
    first = int(state.partition("-")[2])
    assert lost.header.status == "crash"
    assert Path(then.header.config["load_state"]).name == state
    assert then.header.config["continues"] == lost.header.run_id
    assert len(then.header.ranks) == 2
    assert then.header.status == "ok", then.header.reason
    assert steps_of(then) == list(range(first, N_STEPS))
    assert_equals(then, one_device)


def assert_equals(run, one_device):
    found = load_file(run.path / "model.safetensors")
    for name, tensor in one_device.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", ["rank 2 (", "killed by SIGKILL", WAITED]),
        ("hang", ["did not answer within 15 s", "rank 2 (", ", in forward of step 2; ", WAITED]),
    ],
)
def test_the_reason_names_rank_and_operator(runs, fault, words):
    lost, _ = runs.pairs["stages:killed"]
    run = lost if fault == "killed" else runs.ended["pipeline:hang"]
    for word in words:
        assert word in run.header.reason
    if fault == "hang":
        assert run.header.reason.startswith(f"rank 2 ({os.uname().nodename}): no progress for ")
    assert "gloo/" not in run.header.reason
    # Two steps were finished before the third, in which it happened.
    assert steps_of(run) == [0, 1]


def test_ddp_names_the_rank_that_stopped_making_progress(runs):
    reason = runs.ended["ddp:stopped"].header.reason
    assert reason.startswith(f"rank 2 ({os.uname().nodename}): no progress for ")
    stopped = "its process is stopped (SIGSTOP or SIGTSTP); "
    # Then the first of the others that had no answer, in the step's sums or in that of losses.
    assert re.search(rf" s, in forward of step 2; {re.escape(stopped)}rank [01] \(", reason)
    assert "gloo/" not in reason.splitlines()[0]


def test_replicas_lose_nothing_but_a_step_and_the_lost_rank_trains_again(runs, one_device):
    lost, without, back = runs.rejoined
    first_line = lost.header.reason.splitlines()[0]
    assert first_line.startswith("rank 2 (")
    assert "killed by SIGKILL" in first_line
    assert first_line.endswith("; the other ranks go on from step 2, all ranks from step 4")
    assert [Path(run.header.config["load_state"]).name for run in (without, back)] == [
        "survivors-2",
        "step-4",
    ]
    assert [len(run.header.ranks) for run in runs.rejoined] == [3, 2, 3]
    assert [steps_of(run) for run in runs.rejoined] == [[0, 1], [2, 3], [4, 5]]
    # No rank's first step waits while rank 0 plans without each rank, which took 0.5 s.
    began = [
        next(r.start_s for r in spans_of(records) if r.kind == "step")
        - samples_of(records, "clock_offset_s")[0].value
        for records in back.ranks.values()
    ]
    assert max(began) - min(began) < 0.2
    assert {run.header.status for run in (without, back)} == {"ok"}
    assert_equals(back, one_device)


def test_a_lost_stage_comes_from_the_last_save(runs, one_device):
    """The survivors hold step 2, but without the last stage."""
    lost, then = runs.pairs["stages:killed"]
    assert (lost.path / "state" / "survivors-2").is_dir()
    assert_goes_on(lost, then, "step-2", one_device)


@pytest.mark.parametrize(("case", "fault", "state"), IN_CHANGES)
def test_a_rank_that_dies_in_a_change_leaves_the_last_common_step(
    runs, one_device, case, fault, state
):
    """The change is after three steps, of which replicas hold all, and stages those of a save. The
    last training loses a rank after its last step."""
    assert_goes_on(*runs.pairs[f"{case}:{fault}"], state, one_device)


def test_a_launch_that_was_lost_goes_on_with_fewer_ranks_by_another_strategy(runs, one_device):
    *_, then = train(runs.results, 2, "--resume", "features:killed")
    assert then.header.config["strategy"] == "tp=2"
    assert_goes_on(runs.ended[LOST], then, "step-2", one_device)
    losses = samples_of(runs.ended[LOST].ranks[0], "loss")
    assert [loss.step for loss in losses][:2] == [0, 1]  # all before the state

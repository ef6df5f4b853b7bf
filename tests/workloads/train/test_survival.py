"""A training goes on after the loss of a rank or of the launch, and trains what one device does."""

from pathlib import Path

import pytest
import torch
from launching import NEEDS_MPIRUN, PROGRAM, launch
from safetensors.torch import load_file

from harness.domain.record import Span
from harness.measure.store import read_results

HERE = Path(__file__).parents[1]

pytestmark = [*NEEDS_MPIRUN, pytest.mark.timeout(900)]

# fp32 sums in another order: six steps of differences of 1e-7 stay far below.
TOLERANCE = 1e-5
N_STEPS = 6
# Case, where its third rank is killed, and the state from which the others go on.
IN_CHANGES = [
    ("to_stages", "vote", "survivors-3"),
    ("to_stages", "commit", "survivors-3"),
    ("to_replicas", "transfer", "step-2"),
]


def train(results, n_ranks, *words):
    """Train on so many ranks, of which the third is killed; the training runs, in order."""
    program = (*PROGRAM, HERE / "faulty_training.py", results, *words)
    done = launch(n_ranks, *program, path=(HERE.parent, HERE), timeout_s=880)
    assert done.returncode == 0, done.stderr
    runs = [run for run in read_results(results).runs if run.header.workload == "train"]
    return sorted(runs, key=lambda run: run.header.start_utc)


def steps_of(run):
    return [r.step for r in run.ranks[0] if isinstance(r, Span) and r.kind == "step"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One device; then pairs of a run that lost a rank and the one that goes on: of replicas, of
    stages, and of IN_CHANGES."""
    words = "single:killed", "replicas:killed", "stages:killed"
    changing = [f"{case}:{fault}" for case, fault, _ in IN_CHANGES]
    return train(tmp_path_factory.mktemp("lost"), 3, *words, *changing)


@pytest.fixture(scope="module")
def one_device(runs):
    """The model after training on one device."""
    return load_file(runs[0].path / "model.safetensors")


def assert_goes_on(lost, then, state, one_device):
    first = int(state.partition("-")[2])
    assert lost.header.status == "crash"
    assert Path(then.header.config["load_state"]).name == state
    assert then.header.config["continues"] == lost.header.run_id
    assert len(then.header.ranks) == 2
    assert then.header.status == "ok", then.header.reason
    assert steps_of(then) == list(range(first, N_STEPS))
    found = load_file(then.path / "model.safetensors")
    for name, tensor in one_device.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE)


def test_replicas_lose_nothing_but_the_step_in_which_a_rank_died(runs, one_device):
    lost, then = runs[1:3]
    first_line = lost.header.reason.splitlines()[0]
    assert first_line.startswith("rank 2 (")
    assert "killed by SIGKILL" in first_line
    assert first_line.endswith("; the other ranks go on from step 2")
    assert_goes_on(lost, then, "survivors-2", one_device)


def test_a_lost_stage_comes_from_the_last_save(runs, one_device):
    """The survivors hold step 2, but without the last stage."""
    assert (runs[3].path / "state" / "survivors-2").is_dir()
    assert_goes_on(*runs[3:5], "step-2", one_device)


@pytest.mark.parametrize("index", range(len(IN_CHANGES)))
def test_a_rank_that_dies_in_a_change_leaves_the_last_common_step(runs, one_device, index):
    """The change is after three steps, of which replicas hold all, and stages those of a save."""
    assert_goes_on(*runs[5 + 2 * index : 7 + 2 * index], IN_CHANGES[index][2], one_device)


def test_a_launch_that_was_lost_goes_on_with_fewer_ranks(tmp_path, one_device):
    (lost,) = train(tmp_path, 3, "lasting:killed")
    _, then = train(tmp_path, 2, "--resume", "lasting:killed")
    assert_goes_on(lost, then, "step-2", one_device)

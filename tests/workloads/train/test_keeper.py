"""From which state, by which strategy and until which step a training goes on."""

from dataclasses import replace

import msgspec
import pytest
from made_runs import header_of

from harness.cases import Case, check_batches, find_last, plan_runs
from harness.errors import ConfigError
from harness.measure.store import write_header
from harness.workloads.common.contract import config_json
from harness.workloads.train import keeper
from harness.workloads.train.config import TrainCase
from harness.workloads.train.keeper import find_continuation, is_same
from harness.workloads.train.workload import WORKLOAD

CASE = TrainCase(strategy="pipeline", engine="executor", n_ranks=3, survive=True, rejoin=10)


def write_run(results, name, n_ranks, **config):
    header = header_of(["a"] * n_ranks, run_id=name, workload="train", config=config)
    write_header(results / name, header)
    return results / name


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The second run continues the first without a rank; states are named by `save`."""
    saved = {}
    monkeypatch.setattr(keeper, "find_state", lambda run_dir: saved.get(run_dir.name))

    def save(run, step):
        saved[run] = (step, tmp_path / run / "state" / f"step-{step}")

    save.first = write_run(tmp_path, "a", 3)
    save.second = write_run(tmp_path, "b", 2, continues="a")
    return save


def test_a_lost_rank_stays_out_for_rejoin_steps_or_until_others_return(runs):
    runs("a", 5)
    found = find_continuation(CASE, runs.first, [1])
    assert (found.step, found.until, found.strategy) == (5, 15, "")
    again = find_continuation(replace(CASE, n_ranks=2, until=12), runs.second, [1])
    assert (again.step, again.until) == (5, 12)
    assert find_continuation(replace(CASE, rejoin=None), runs.first, [1]).until is None


@pytest.mark.parametrize(
    ("rejoin", "first_step", "step"), [(10, 0, 4), (10, 4, None), (None, 0, None)]
)
def test_all_ranks_start_again_if_they_have_trained_since_they_last_did(
    runs, rejoin, first_step, step
):
    runs("a", 4)
    case = replace(CASE, rejoin=rejoin, first_step=first_step)
    found = find_continuation(case, runs.first, [0, 1, 2])
    assert (found and found.step, found and found.until) == (step, None)


def test_a_run_without_a_state_goes_on_from_that_of_the_run_before(runs):
    runs("a", 7)
    for lost in ([0], []):
        found = find_continuation(replace(CASE, n_ranks=2), runs.second, lost)
        assert (found.run_id, found.step) == ("b", 7)
        assert found.state.endswith("a/state/step-7")


def test_all_ranks_go_on_by_their_last_strategy(runs):
    for step in (3, 6, 9):
        (runs.first / f"strategy-{step}.json").write_bytes(b"")
    runs("b", 8)
    found = find_continuation(CASE, runs.second, [])
    assert (found.step, found.strategy) == (8, str(runs.first / "strategy-6.json"))


@pytest.mark.parametrize(
    ("run", "batch", "is_refused"),
    [
        ({}, 64, True),
        ({}, 96, False),  # goes on
        ({}, 48, False),  # was given
        ({"status": "ok"}, 64, False),
        ({"seed": 1}, 64, False),
    ],
)
def test_a_launch_of_fewer_ranks_is_not_begun_again_by_their_default_batch(
    runs, run, batch, is_refused
):
    status, results = run.pop("status", "crash"), runs.first.parent
    runs("a", 5)
    config = config_json(replace(CASE, batch=96, **run))
    header = header_of(["a"] * 3, run_id="a", workload="train", config=config)
    write_header(runs.first, header)
    config = {"continues": "a"}
    last = header_of(["a"] * 2, run_id="b", workload="train", config=config, status=status)
    write_header(runs.second, last)
    case = Case(name="train", workload=WORKLOAD, config=replace(CASE, batch=batch, n_ranks=2))
    planned = plan_runs([case], header.ranks[:2])
    if not is_refused:
        check_batches(planned, results, 2)
        return
    words = "b trains global batches of 96 on 3 ranks, .* 64 on 2: give --batch-size 96 .* step 5,"
    with pytest.raises(ConfigError, match=words):
        check_batches(planned, results, 2)


def test_a_launch_that_goes_on_may_save_at_other_steps(runs):
    runs("a", 5)
    other = replace(CASE, save_every=7, survive=False, rejoin=None, n_workers=2)
    assert is_same(config_json(other), config_json(CASE))
    assert find_continuation(replace(other, save_every=None), runs.first, []).step == 5
    assert not is_same(config_json(replace(CASE, steps=7)), config_json(CASE))


def test_the_training_with_the_same_flags_of_saving_goes_on_first(tmp_path):
    for at, every in enumerate([5, 7, 5, 9]):
        config = config_json(replace(CASE, save_every=every))
        header = header_of(["a"] * 3, run_id=f"r{at}", workload="train", config=config)
        write_header(tmp_path / f"r{at}", msgspec.structs.replace(header, start_utc=f"202{at}"))

    def last(every):
        case = Case(name="train", workload=WORKLOAD, config=replace(CASE, save_every=every))
        return find_last(tmp_path, case, 0, 3).run_id

    assert [last(every) for every in (5, 7, 1)] == ["r2", "r1", "r3"]

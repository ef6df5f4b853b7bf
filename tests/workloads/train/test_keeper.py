"""From which state, by which strategy and until which step a training goes on."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_runs import header_of

from harness.cases import Case, plan_runs
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import ConfigError, ResultsError
from harness.measure.store import write_header
from harness.resume import check_batches, check_ended, find_earlier, find_resumed
from harness.runtime.executor.state import files
from harness.workloads.common.contract import config_json
from harness.workloads.train import keeper, saves
from harness.workloads.train.config import TrainCase
from harness.workloads.train.keeper import StateKeeper, differing, find_continuation, go_on
from harness.workloads.train.workload import WORKLOAD

CASE = TrainCase(strategy="pipeline", engine="executor", n_ranks=3, survive=True, rejoin=10)


def write_run(results, name, n_ranks, *, status="running", start_utc="2026", **config):
    config = config_json(replace(CASE, **{**config, "n_ranks": n_ranks}))
    header = header_of(
        ["a"] * n_ranks, run_id=name, workload="train", config=config, status=status,
        start_utc=start_utc,
    )  # fmt: skip
    write_header(results / name, header)
    return results / name


def test_the_last_state_that_is_whole_on_all_hosts_is_fetched(tmp_path, monkeypatch):
    """Rank 0 has its shard of each state; other hosts lack one of the last, and have all others."""
    states = tmp_path / "state"
    elsewhere = {"step-4": ["shard1"], "survivors-6": ["shard1"], "step-8": []}
    (states / "step-4").mkdir(parents=True)
    fetched = []

    def fetch(directory):
        fetched.append(directory.name)
        for name in elsewhere if directory == states else []:
            (states / name).mkdir(exist_ok=True)
        for name in elsewhere.get(directory.name, []):
            (directory / name).touch()

    def check(directory):
        if not (directory / "shard1").exists():
            raise ResultsError("one is missing")

    monkeypatch.setattr(files, "check_sharded", check)
    assert keeper.find_state(tmp_path, fetch) == (6, states / "survivors-6")
    assert fetched == ["state", "step-8", "survivors-6"]


def test_states_of_which_none_is_whole_are_named(tmp_path, caplog):
    for step in (4, 8):
        (tmp_path / "state" / f"step-{step}").mkdir(parents=True)
    assert keeper.find_state(tmp_path, lambda directory: None) is None
    wanted = f"no state of {tmp_path.name} is whole, so its steps are trained again: {tmp_path}"
    assert f"{wanted}/state/step-8 holds" in caplog.text


@pytest.mark.parametrize(("n_more", "saved"), [(0, []), (1, ["survivors-1"])])
def test_the_warm_up_is_not_trained_twice(tmp_path, n_more, saved):
    """A run that goes on from a step above 0 has none."""
    found = []
    survivor = SimpleNamespace(
        n_more_steps=lambda: n_more, save=lambda path, run: found.append(path.name)
    )
    kept = StateKeeper(replace(CASE, survive=False), SimpleNamespace(run_dir=tmp_path))
    kept.begin_step(0, None)
    kept._save(survivor)
    assert found == saved


def test_all_ranks_meet_before_a_save_replaces_another(tmp_path, monkeypatch):
    """A rank that idles would delete the states that the others have not written yet."""
    met, recorded = [], []
    monkeypatch.setattr(keeper, "barrier", lambda: met.append("all ranks"))
    # As after an evaluation, the recorder has no step.
    recorder = SimpleNamespace(sample=lambda *_, step=None: recorded.append(step))
    context = SimpleNamespace(world=SimpleNamespace(size=2), recorder=recorder, run_dir=tmp_path)
    started = SimpleNamespace(start=lambda shard, new, old: met.append((new.name, old.name)))
    monkeypatch.setattr(saves, "BackgroundSaves", lambda *_: started)
    kept = StateKeeper(replace(CASE, save_every=2), context)
    training = SimpleNamespace(executor=SimpleNamespace(shard=lambda run: None))
    for step in range(8):
        kept.end_step(step, training)
    assert met[-2:] == ["all ranks", ("step-8", "step-2")]
    assert recorded == [1, 3, 5, 7]


def planned_of(*cases, n_started=3):
    ranks = header_of(["a"] * n_started).ranks
    return plan_runs([Case(name="train", workload=WORKLOAD, config=case) for case in cases], ranks)


def last_of(results, *cases):
    """The run from which the first case of a launch of 3 ranks would go on."""
    planned = planned_of(*cases)
    return next(iter(find_earlier(results, planned[0], planned, 3)), None)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The second run continues the first without a rank; states are named by `save`."""
    saved = {}
    monkeypatch.setattr(keeper, "find_state", lambda run_dir, fetch: saved.get(run_dir.name))

    def save(run, step):
        saved[run] = (step, tmp_path / run / "state" / f"step-{step}")

    save.first = write_run(tmp_path, "a", 3)
    save.second = write_run(tmp_path, "b", 2, continues="a")
    return save


def test_the_first_strategy_is_that_of_as_many_ranks_before_any_change(runs, tmp_path):
    third = write_run(tmp_path, "c", 3, continues="b", asked_strategy="pipeline")
    for run in (runs.first, runs.second, third):
        (run / "strategy.json").touch()
    assert keeper.first_strategy(CASE, third) == runs.first / "strategy.json"
    assert keeper.first_strategy(replace(CASE, n_ranks=2), runs.second) is None


def test_a_lost_rank_stays_out_for_rejoin_steps_or_until_others_return(runs):
    runs("a", 5)
    found = find_continuation(CASE, runs.first, [1])
    assert (found.step, found.until, found.strategy) == (5, 15, "")
    again = find_continuation(replace(CASE, n_ranks=2, until=12), runs.second, [1])
    assert (again.step, again.until) == (5, 12)
    assert find_continuation(replace(CASE, rejoin=None), runs.first, [1]).until is None
    assert find_continuation(replace(CASE, steps=15), runs.first, [1]).until is None


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


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({}, ""),
        ({"stages": 3}, "ddp"),
        ({"stages": 2, "shard_state": "optimizer"}, ""),
        ({"strategy": "tp=3"}, "ddp"),
        ({"strategy": "ddp", "shard_state": "optimizer"}, ""),
    ],
)
def test_ranks_that_are_left_go_on_by_a_strategy_that_fits_them(runs, changes, strategy):
    runs("a", 5)
    assert find_continuation(replace(CASE, **changes), runs.first, [1]).strategy == strategy


@pytest.mark.parametrize(
    ("n_left", "sync_every", "unlike"), [(1, 1, set()), (2, 4, {"sync_every"})]
)
def test_a_rank_that_is_left_alone_averages_nothing(runs, n_left, sync_every, unlike):
    case = replace(CASE, strategy="ddp", sync_every=4)
    runs("a", 5)
    lost = list(range(n_left, 3))
    alone = go_on(case, find_continuation(case, runs.first, lost), n_left)
    assert alone.sync_every == sync_every
    asked = replace(case, n_ranks=n_left, sync_every=1)
    assert differing(config_json(asked), config_json(case)) == unlike


def test_all_ranks_go_on_by_their_last_strategy(runs):
    for step in (3, 6, 9):
        (runs.first / f"strategy-{step}.json").write_bytes(b"")
    runs("b", 8)
    found = find_continuation(CASE, runs.second, [])
    assert (found.step, found.strategy) == (8, str(runs.first / "strategy-6.json"))


def test_changes_that_were_not_made_follow_if_there_are_ranks_for_them(runs, tmp_path):
    plan = Strategy(name="x", batch=8, operators={"a": OperatorPlan({}, [0, 2])})
    (tmp_path / "x.json").write_bytes(plan.to_json())
    (runs.first / "strategy-3.json").write_bytes(b"")
    case = replace(CASE, change=tuple(f"{step}:{tmp_path}/x.json" for step in (3, 7, 12)))
    runs("b", 8)
    found = find_continuation(case, runs.second, [])
    assert (found.strategy[-6:], go_on(case, found, 3).change) == ("3.json", case.change[1:])
    for fewer, lost in ((replace(case, n_ranks=2), []), (case, [1])):
        assert find_continuation(fewer, runs.second, lost).change == ()


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
    config = config | {"continues": "a"}
    last = header_of(["a"] * 2, run_id="b", workload="train", config=config, status=status)
    write_header(runs.second, last)
    planned = planned_of(replace(CASE, batch=batch, n_ranks=2), n_started=2)
    if not is_refused:
        check_batches(planned, results, 2)
        return
    words = "b trains global batches of 96 on 3 ranks, .* 64 on 2: give --batch-size 96 .* step 5,"
    with pytest.raises(ConfigError, match=words):
        check_batches(planned, results, 2)


def test_a_run_that_another_launch_still_trains_is_not_gone_on_with(runs):
    runs("a", 5)
    runs("b", 6)

    def check(strategies):
        for name, strategy in strategies.items():
            status = "crash" if name == "a" else "running"
            write_run(runs.first.parent, name, 3, status=status, strategy=strategy)
        check_ended(planned_of(CASE), runs.first.parent, 3)

    check({"a": "pipeline", "b": "ddp"})  # goes on from its own
    for strategies in ({"a": "dp=3", "b": "pipeline"}, {"a": "zero1", "b": "ddp"}):
        with pytest.raises(ConfigError, match="another launch still trains b, or its host was"):
            check(strategies)


def test_a_launch_that_goes_on_may_save_at_other_steps(runs):
    runs("a", 5)
    other = replace(CASE, save_every=7, survive=False, rejoin=None, n_workers=2)
    assert not differing(config_json(other), config_json(CASE))
    assert find_continuation(replace(other, save_every=None), runs.first, []).step == 5
    for flags in ({"steps": 7}, {"load_state": Path("other")}):
        assert differing(config_json(replace(CASE, **flags)), config_json(CASE)) == flags.keys()


def test_the_training_with_the_same_flags_of_saving_goes_on_first(tmp_path):
    for at, every in enumerate([5, 7, 5, 9]):
        write_run(tmp_path, f"r{at}", 3, start_utc=f"202{at}", save_every=every)

    def last(every):
        return last_of(tmp_path, replace(CASE, save_every=every)).header.run_id

    assert [last(every) for every in (5, 7, 1)] == ["r2", "r1", "r3"]


def test_a_newer_run_without_a_state_is_passed_over(runs):
    runs("a", 5)
    write_run(runs.first.parent, "b", 3, start_utc="2027")
    planned = planned_of(CASE)
    assert find_resumed(runs.first.parent, planned[0], planned, 3).run_id == "a"


def test_a_run_that_others_have_ended_is_named_with_their_hosts(runs, caplog):
    caplog.set_level("INFO")
    write_run(runs.first.parent, "b", 3, continues="a", status="ok")
    planned = planned_of(CASE)
    assert find_resumed(runs.first.parent, planned[0], planned, 3).run_id == "b"
    assert caplog.messages == [f"{planned[0].title}: done, by b on a"]


def with_strategy(strategy, **more):
    return replace(CASE, strategy=strategy, **more)


WORDS = "strategy dp=3 instead of pipeline"
LATER = "begins again, not from step 5 of a"


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        ([CASE], "the ranks of a go on from step 5"),
        ([with_strategy("dp=3")], f"the ranks of a go on from step 5, with {WORDS}"),
        (
            [with_strategy("pipeline", microbatches=2, n_ranks=2)],
            "the ranks of a go on from step 5, with microbatches 2 instead of None, n_ranks 2 "
            "instead of 3",
        ),
        (
            [with_strategy("dp=3"), with_strategy("ddp")],
            f"{LATER}, with {WORDS}: other runs of this launch could go on as well, start one of "
            "them alone",
        ),
        ([with_strategy("dp=3"), CASE], None),  # goes on itself
        (
            [with_strategy("dp=3", seed=1)],
            f"{LATER}, with seed 1 instead of 0: give the same to go on",
        ),
        ([with_strategy("dp=3", seed=1, steps=7)], None),
        (
            [replace(CASE, code_digest="new"), with_strategy("dp=3", code_digest="new")],
            "the ranks of a go on from step 5, with code_digest new instead of ",
        ),
        ([with_strategy("dp=3", code_digest="new"), replace(CASE, code_digest="new")], None),
        ([replace(CASE, code_digest="new", n_ranks=2), replace(CASE, code_digest="new")], None),
    ],
)
def test_a_training_goes_on_by_another_strategy_if_one_run_alone_could(runs, launch, text):
    runs("a", 5)
    shutil.rmtree(runs.second)
    last = last_of(runs.first.parent, *launch)
    assert (last and last.text(find_continuation(launch[0], runs.first, ()))) == text


def test_a_training_that_was_given_another_strategy_belongs_to_it(runs):
    """What the strategy before has changed to is that of the old one."""
    runs("b", 8)
    (runs.first / "strategy-3.json").write_bytes(b"")
    other = with_strategy("dp=3")
    found = find_continuation(other, runs.second, ())
    assert (found.step, found.strategy) == (8, "")
    write_run(runs.first.parent, "c", **vars(go_on(other, found, 3)))
    assert not last_of(runs.first.parent, other).unlike
    assert last_of(runs.first.parent, CASE).unlike == {"strategy": ("pipeline", "dp=3")}
    assert last_of(runs.first.parent, CASE, other) is None
    (runs.first.parent / "c" / "strategy-9.json").write_bytes(b"")
    assert find_continuation(other, runs.first.parent / "c", ()).strategy == ""
    runs("c", 9)
    found = find_continuation(other, runs.first.parent / "c", ())
    assert found.strategy.endswith("c/strategy-9.json")
    assert not differing(config_json(other), config_json(go_on(other, found, 3)))


def test_a_finished_training_is_not_gone_on_with_by_another_strategy(runs):
    write_run(runs.first.parent, "b", 3, status="ok", continues="a")
    assert last_of(runs.first.parent, CASE).header.run_id == "b"
    assert last_of(runs.first.parent, with_strategy("dp=3")) is None

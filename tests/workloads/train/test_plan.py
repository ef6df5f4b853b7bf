"""Training what was planned: the strategy on all ranks, what is fed, counted and written."""

import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import planned_results
import pytest
import train_on_ranks
import tyro
from local_ranks import largest_difference, run_on_ranks
from made_runs import local_header

from harness.domain.graph import Graph, Operator
from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.strategy import Strategy
from harness.errors import PlanError, StrategyError
from harness.measure.derive.spans import samples_of
from harness.measure.derive.training import training_summary
from harness.measure.store import Run, read_header, write_header
from harness.workloads.common.contract import config_json
from harness.workloads.planning.config import (
    ProfileConfig,
    SearchConfig,
    profile_cases,
    search_cases,
)
from harness.workloads.planning.inputs import read_inputs
from harness.workloads.search.workload import WORKLOAD, run_search, search_text
from harness.workloads.train.config import TrainCase
from harness.workloads.train.plan import check_samples_apart, search_config_of, train_needs
from harness.workloads.train.workload import run_train

CASE = TrainCase(
    model="lenet", batch=12, n_samples=30, steps=4, warm_up=1, no_sync_steps=0, learning_rate=0.05,
    search_budget=60, trials=1, n_ranks=2, lr_schedule="step", lr_step_size=2,
)  # fmt: skip
# fp32 sums in another order: 5 steps of differences of 1e-7 stay far below.
TOLERANCE = 1e-5

MEASURED = replace(CASE, engine="executor", noise_steps=16, noise_every=2)

# Stands for where the case before has saved its state.
SAVED = Path("state")

# 30 samples in batches of 12 leave 6, which the executor drops: `single` by it is the reference.
CASES = {
    "single": replace(MEASURED, strategy="single"),
    "ddp": replace(MEASURED, strategy="ddp"),
    "torch ddp": replace(CASE, strategy="ddp", n_samples=24),
    "tensor": replace(MEASURED, strategy="tensor", save_sharded=True),
    "single goes on": replace(CASE, strategy="single", engine="executor", load_state=SAVED),
    "pipeline goes on": replace(CASE, strategy="pipeline", engine="executor", load_state=SAVED),
    "searched": replace(CASE, strategy="searched", engine="executor"),
    "pipeline": replace(CASE, strategy="pipeline", engine="executor", microbatches=3),
    "gpipe": replace(
        MEASURED, strategy="pipeline", schedule="gpipe", microbatches=4, recompute=True
    ),
    "interleaved": replace(
        CASE, strategy="pipeline", engine="executor", schedule="interleaved", microbatches=2
    ),
    "asynchronous": replace(
        CASE, strategy="pipeline", engine="executor", asynchronous=True, microbatches=2
    ),
    "again": replace(CASE, strategy="ddp", engine="executor"),
    "missing file": replace(CASE, strategy="/nowhere/plan.json", engine="executor"),
    "too many stages": replace(CASE, strategy="pipeline", engine="executor", stages=3),
    "small replicas": replace(CASE, engine="executor", sync_every=2, shard_state="optimizer"),
}  # fmt: skip
TRAINED_ALIKE = ["ddp", "torch ddp", "tensor", "searched", "pipeline", "gpipe", "interleaved"]


def measured(search_config=None):
    """Writes what planning reads into the directory of a run on two ranks."""
    return partial(
        planned_results.write_inputs, search_config=search_config or search_config_of(CASE), size=2
    )


@pytest.fixture(scope="session")
def trained():
    """By rank: the losses of each case, or the error it ended with."""
    return run_on_ranks(train_on_ranks.planned_trainings, CASES, 2, measured())[0]


@pytest.mark.parametrize("name", TRAINED_ALIKE)
def test_every_strategy_trains_what_one_device_trains(trained, name):
    expected, found = trained[0]["single"], trained[0][name]
    assert found["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert largest_difference(found["state"], expected["state"]) < TOLERANCE
    if CASES[name].noise_steps:
        assert len(expected["squares"]) == MEASURED.noise_steps  # after the last step
        assert found["squares"] == pytest.approx(expected["squares"], rel=1e-3)


def test_measuring_the_noise_scale_on_the_way_changes_no_bit(trained):
    digests = {trained[0][name]["summary"]["parameters_digest"] for name in ("ddp", "again")}
    assert len(digests) == 1


def test_the_parts_that_ranks_wrote_are_the_model_and_its_momenta(trained):
    state, sharded = trained[0]["tensor"]["state"], trained[0]["tensor"]["sharded"]
    assert largest_difference(sharded["model"], state) == 0
    momenta = [values["momentum_buffer"].shape for values in sharded["optimizer"]["state"].values()]
    assert momenta == [tensor.shape for tensor in sharded["model"].values()]


def test_training_goes_on_from_what_ranks_wrote(trained):
    expected, found = trained[0]["single goes on"], trained[0]["pipeline goes on"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert largest_difference(found["state"], expected["state"]) < TOLERANCE
    # The same data once more: what was learned from them is there.
    before = trained[0]["single"]["losses"]
    assert all(now < then for now, then in zip(found["losses"], before, strict=True))


def test_weights_that_are_updated_between_microbatches_train_another_model(trained):
    expected, found = trained[0]["single"], trained[0]["asynchronous"]
    assert found["losses"] != pytest.approx(expected["losses"], abs=TOLERANCE)


@pytest.mark.parametrize("name", [*TRAINED_ALIKE, "asynchronous"])
def test_each_sample_of_a_step_counts_on_one_rank(trained, name):
    assert sum(trained[0][name]["summary"]["shares"]) == 12


def test_a_pipelines_samples_count_where_its_loss_is(trained):
    assert trained[0]["pipeline"]["summary"]["shares"] == [0, 12]


def test_the_parameters_of_all_ranks_are_counted(trained):
    counts = {trained[0][name]["summary"]["n_parameters"] for name in TRAINED_ALIKE}
    assert counts == {61706}


def test_the_summary_says_how_microbatches_flow(trained):
    found = {
        name: [trained[1][name]["summary"][k] for k in ("schedule", "n_microbatches", "n_stages")]
        for name in ("ddp", "pipeline", "interleaved")
    }
    assert found == {
        "ddp": ["gpipe", 1, 1],
        "pipeline": ["1f1b", 3, 2],
        "interleaved": ["interleaved", 2, 4],
    }


@pytest.mark.parametrize("name", ["single", *TRAINED_ALIKE, "asynchronous"])
def test_strategy_and_prediction_lie_beside_the_run(trained, name, tmp_path):
    (tmp_path / PREDICTION_FILE).write_text(trained[0][name][PREDICTION_FILE])
    prediction = Prediction.load(tmp_path / PREDICTION_FILE)
    strategy = Strategy.from_json(trained[0][name][STRATEGY_FILE].encode())
    assert prediction.strategy == strategy.name
    assert prediction.step_s == trained[0][name]["summary"]["predicted_step_s"] > 0
    assert set(prediction.memory_bytes) == {"node0:0", "node1:0"}
    assert {span.kind for span in prediction.spans["0"]} >= {"step", "optimizer"}


def test_recomputation_is_in_the_strategy(trained):
    strategy = Strategy.from_json(trained[0]["gpipe"][STRATEGY_FILE].encode())
    assert [stage.recompute for stage in strategy.stages] == [True, True]


def test_what_rank_0_refuses_all_refuse(trained):
    for name, message in {
        "missing file": "StrategyError: strategy file /nowhere/plan.json: No such file",
        "too many stages": "StrategyError: 3 stages cannot be made of 13 operators on 2 devices",
        "small replicas": "StrategyError: --shard-state optimizer divides weights among the "
        "devices of a replica that hold them, and strategy 'ddp' has each on one",
    }.items():
        for rank in trained:
            assert rank[name].startswith(message)


def test_flops_of_the_ranks_sum_to_those_of_one():
    rates = []
    for case in (CASES["tensor"], replace(CASE, strategy="ddp", n_samples=24)):
        _, run = run_on_ranks(run_train, case, 2, measured())
        summary = training_summary(run)
        rates.append(summary.flops_per_s * summary.duration.median)
    # An executed step counts the same products, however they are cut.
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


def test_only_what_needs_a_plan_needs_measurements():
    def names(case):
        return [need.name for need in train_needs(case)]

    assert names(CASE) == []
    assert names(replace(CASE, predict=True)) == ["links", "profile"]
    assert names(CASES["tensor"]) == ["links", "profile"]
    assert names(CASES["searched"]) == ["links", "profile", "search"]
    assert names(replace(CASES["single"], n_ranks=1)) == ["profile"]
    assert names(replace(CASE, engine="deepspeed", strategy="zero1", predict=True)) == []


def test_a_search_on_one_rank_needs_no_links():
    names = [
        [need.name for need in WORKLOAD.needs(search_cases(SearchConfig(model="lenet"), n)[0])]
        for n in (1, 2)
    ]
    assert names == [["profile"], ["links", "profile"]]


def test_needs_are_met_by_finished_runs(tmp_path):
    links, profile = train_needs(CASES["tensor"])
    here, elsewhere = planned_results.launched_cluster(2), planned_results.launched_cluster(3)
    assert not links.is_met(tmp_path, here)
    planned_results.write_links(tmp_path, 2)
    assert links.is_met(tmp_path, here)
    assert not links.is_met(tmp_path, elsewhere)
    assert not profile.is_met(tmp_path, here)
    planned_results.write_profile(tmp_path, search_config_of(CASE), 2)
    assert profile.is_met(tmp_path, here)
    other = train_needs(replace(CASES["tensor"], batch=24))[1]
    assert not other.is_met(tmp_path, here)
    known, unknown = (train_needs(replace(CASES["pipeline"], microbatches=n))[1] for n in (4, 5))
    assert known.is_met(tmp_path, here)
    assert not unknown.is_met(tmp_path, here)


def test_a_plan_that_survives_a_lost_rank_shards_only_what_is_asked_for():
    asked = {"auto": "none", "optimizer_in_node": "optimizer_in_node"}
    for given, wanted in asked.items():
        case = replace(CASES["searched"], shard_state=given)
        assert search_config_of(case).shard_state == given
        assert search_config_of(replace(case, survive=True)).shard_state == wanted


def test_a_profile_that_was_made_ahead_is_known(tmp_path):
    planned_results.write_profile(tmp_path, search_config_of(CASE), 2)
    (made,) = profile_cases(ProfileConfig(model=CASE.model, batch_size=CASE.batch), 2)
    path = tmp_path / "run-profile-0"
    write_header(path, msgspec.structs.replace(read_header(path), config=config_json(made)))
    _, profile = train_needs(CASES["tensor"])
    assert profile.is_met(tmp_path, planned_results.launched_cluster(2))


def test_a_missing_profile_is_made_by_the_command_that_is_told(tmp_path):
    search_config = replace(search_config_of(CASE), image_size=32, dtype="bf16", n_ranks=1)
    write_header(tmp_path / "run", local_header(["node0"]))
    with pytest.raises(PlanError) as refused:
        read_inputs(search_config, tmp_path / "run")
    command = str(refused.value).partition("run ./entry.sh profile ")[2].removesuffix(" on them")
    config = tyro.cli(ProfileConfig, args=shlex.split(command))
    assert config == search_config.profile_config()


@pytest.mark.parametrize("failed", ["profile", "links"])
def test_the_reason_is_that_of_the_run_that_should_have_measured(tmp_path, failed):
    write_header(tmp_path / "run", local_header(["node0", "node1"]))
    search_config = search_config_of(CASES["ddp"])
    config = config_json(search_config.profile_config()) if failed == "profile" else {}
    if failed == "profile":
        planned_results.write_links(tmp_path, 2)
    run = tmp_path / f"1-{failed}-a"
    header = local_header(
        ["node0", "node1", "node2"], run_id=run.name, workload=failed,
        status="crash", reason="rank 2 (node2): boom\nTraceback", config=config,
        start_utc="2026-01-02",
    )  # fmt: skip
    write_header(run, header)
    with pytest.raises(PlanError, match=rf"^{failed} failed: rank 2 \(node2\): boom$"):
        read_inputs(search_config, tmp_path / "run")
    write_header(run, msgspec.structs.replace(header, status="ok"))
    with pytest.raises(PlanError, match=r": run \./entry\.sh"):
        read_inputs(search_config, tmp_path / "run")


@pytest.fixture(scope="module")
def tried():
    """A search that tries three plans."""
    return searched(trials=3)


def test_the_search_workload_writes_what_searched_trains(tried):
    found, run = tried
    assert found[1] == {}
    summary = found[0]
    assert summary["predicted_step_s"] > 0
    asked = config_json(replace(search_config_of(CASE), search_budget=40))
    header = msgspec.structs.replace(run.header, summary=summary, config=asked)
    text = search_text([Run(path=run.path, header=header, ranks=run.ranks)])
    assert "plans that were tried: " in text


def searched(body=run_search, **changes):
    """What a short search on two ranks returned, and its run."""
    search_config = replace(search_config_of(CASE), search_budget=40, **changes)

    return run_on_ranks(body, search_config, 2, measured(search_config))


def test_a_plan_that_the_backend_refuses_is_not_tried():
    found, run = searched(train_on_ranks.search_whose_best_is_refused, trials=3)
    tried = [r.labels["plan"] for r in samples_of(run.ranks[0], "trial_step_s")]
    assert 1 <= len(tried) <= 2
    assert found[0]["strategy"] in tried


def test_the_fastest_of_the_plans_that_were_tried_is_chosen(tried):
    found, run = tried
    times = {r.labels["plan"]: r.value for r in samples_of(run.ranks[0], "trial_step_s")}
    assert 2 <= len(times) <= 3
    assert found[0]["strategy"] == min(times, key=times.__getitem__)
    assert all(seconds > 0 for seconds in times.values())
    lines = found[0]["text"]
    head = next(k for k, line in enumerate(lines) if line.startswith("tried for some steps"))
    method = lines[head + 2].split("  ")[0]
    assert any(f"found by {method};" in line for line in lines)


def test_without_trials_the_prediction_decides():
    found, run = searched(trials=1)
    assert not samples_of(run.ranks[0], "trial_step_s")
    assert found[0]["predicted_step_s"] > 0
    assert found[0]["speedup_over_single"] >= 1


@pytest.mark.parametrize("name", ["ddp", "asynchronous", "searched"])
def test_a_plan_is_kept_and_predicted_by_the_present_calibration(name):
    found = run_on_ranks(train_on_ranks.plans_at_two_calibrations, CASES[name], 2, measured())[0][0]
    made, again, slower = (
        Prediction.from_json(files[PREDICTION_FILE], source=name) for files in found
    )
    assert len({files[STRATEGY_FILE] for files in found}) == 1
    assert made.calibrations == {}
    assert again == msgspec.structs.replace(made, step_s=123.0, search_s=45.0)
    assert slower.calibrations == {"test device, 12 samples": 3.0}
    assert made.step_s < slower.step_s < 4 * made.step_s
    assert slower.method == made.method
    assert slower.search_s == 45.0


def test_a_repeat_is_predicted_by_the_speeds_that_it_measured():
    case = replace(CASE, strategy="ddp", balance="speed")
    found = run_on_ranks(train_on_ranks.plans_at_two_speeds, case, 2, measured())[0][0]
    first, second = (Strategy.from_json(data) for data in found)
    assert _shares(first) == [8, 4]
    assert _shares(second) == [4, 8]


def _shares(strategy):
    """Samples of each device's block of the loss."""
    (sizes,) = strategy.operators["loss"].partition.values()
    return list(sizes)


MIXED = Graph(
    name="mixed",
    batch=12,
    operators=[
        Operator(name="x", kind="input", shape={"sample": 12, "feature": 4}),
        Operator(name="roll", kind="other", inputs=["x"], attrs={"mixes_samples": True}),
    ],
)


@pytest.mark.parametrize(
    ("engine", "n_ranks", "is_refused"),
    [("torch", 2, True), ("torch", 1, False), ("executor", 2, False)],
)
def test_ddp_by_torch_is_refused_where_samples_depend_on_each_other(engine, n_ranks, is_refused):
    case = replace(CASE, strategy="ddp", engine=engine)
    refused = pytest.raises(StrategyError, match="operator 'roll' needs all samples of a batch")
    with refused if is_refused else nullcontext():
        check_samples_apart(case, MIXED, n_ranks)

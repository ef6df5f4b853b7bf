"""A training run changes its strategy by --change or by a controller's request."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import planned_results
import pytest
import train_on_ranks
from local_ranks import run_on_ranks
from made_graphs import replicated_pipeline, small_cluster
from made_runs import local_header

from harness.domain.cluster import Cluster
from harness.domain.freezing import frozen_operators
from harness.errors import ConfigError, DataError, HarnessError, ResultsError, StrategyError
from harness.measure.store import write_header
from harness.plan import builders
from harness.plan.again import predict_change_s
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.plan.formats.pipedream import PipeDreamPlan, stages_by_modules
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator
from harness.runtime.executor.cache.activations import Activations, HeldRows
from harness.workloads.planning.inputs import capture_graph
from harness.workloads.train import cache
from harness.workloads.train.cache import TrainingCache, _RecordedFreeze
from harness.workloads.train.changes import StrategyChanges
from harness.workloads.train.config import TrainCase
from harness.workloads.train.next_plan import estimate_cached_bytes, estimate_moved_bytes
from harness.workloads.train.plan import search_config_of
from harness.workloads.train.policy import Current, Due
from harness.workloads.train.requests import (
    REQUEST_FILE,
    UNREADABLE,
    ChangeAnswer,
    ControlOptions,
    answer_request,
    check_listens,
    control,
    read_answer,
    read_request,
    write_request,
)

CASE = TrainCase(
    model="lenet", batch=12, n_samples=36, steps=6, warm_up=1, no_sync_steps=0, learning_rate=0.05,
    n_ranks=2, strategy="ddp", engine="executor",
)  # fmt: skip
# 3 steps an epoch, which drops 4 samples; 2, 3 and 4 layers are frozen after 3, 6 and 9 steps.
FROZEN = replace(
    CASE, n_samples=40, steps=14, freeze="schedule", freeze_alpha=0.5, freeze_interval=3,
    change=("7:pipeline.json",),
)  # fmt: skip
UNFROZEN = replace(FROZEN, lr_schedule="step", lr_step_size=10, unfreeze=10)
PIPELINE = replace(
    CASE, strategy="pipeline", microbatches=2, freeze="schedule", freeze_alpha=0.5,
    freeze_interval=2,
)  # fmt: skip
CASES = {
    "unchanged": CASE,
    "changed": replace(CASE, change=("2:pipeline.json", "4:single.json")),
    "controlled": replace(CASE, controlled=True, change=("1:pipeline.json",)),
    "frozen": replace(
        CASE, freeze="schedule", freeze_alpha=0.5, freeze_interval=2, change=("3:pipeline.json",)
    ),
    "frozen pipeline": PIPELINE,
    "shrunk": replace(PIPELINE, shrink="pipetransformer", replicate=True),
    "searched again": replace(PIPELINE, shrink="search", replicate=True, search_budget=200),
    "uncached": FROZEN,
    "cached": replace(FROZEN, cache="on", cache_memory=0.02),
    "unfrozen": UNFROZEN,
    "unfrozen cached": replace(UNFROZEN, cache="on"),
    "cached where it pays": replace(FROZEN, cache="auto"),
    "frozen before cached": replace(
        FROZEN, freeze_interval=2, cache="on", change=("3:pipeline.json",), steps=6
    ),
    "other batch": replace(CASE, change=("2:other.json",)),
    "other schedule": replace(
        PIPELINE, freeze="none", asynchronous=True, change=("2:single.json",)
    ),
    "other model": replace(CASE, controlled=True, change=("1:model.json",)),
}
N_PARAMETERS = 61706


def strategies_of(graph):
    ddp = builders.ddp(graph, small_cluster(2), 12)
    pipeline = replicated_pipeline(graph, 12, [[0], [1]], n_microbatches=2, schedule="gpipe")
    unknown = {f"no {name}": plan for name, plan in ddp.operators.items()}
    return {
        "pipeline": msgspec.structs.replace(pipeline, name="pipeline"),
        "single": builders.single(graph, 12),
        "ddp": ddp,
        "other": msgspec.structs.replace(ddp, batch=24),
        "model": msgspec.structs.replace(ddp, operators=unknown),
    }


def write_strategies(directory):
    for name, strategy in strategies_of(capture_graph(search_config_of(CASE))).items():
        (directory / f"{name}.json").write_bytes(strategy.to_json())


@pytest.fixture(scope="module")
def trained():
    """By rank: what each case trained, or the error it ended with."""

    def beside(directory):
        planned_results.write_inputs(directory, search_config_of(CASE), 2)
        write_strategies(directory)

    return run_on_ranks(train_on_ranks.changing_trainings, CASES, 2, beside)[0]


def changes_of(trained, name):
    """Step and labels of each change of a case, on rank 0."""
    samples = trained[0][name]["samples"]
    return [(step, labels) for metric, step, _, labels in samples if metric == "change_s"]


def strategies_after(trained, name):
    return [(step, labels["after"]) for step, labels in changes_of(trained, name)]


@pytest.mark.parametrize("name", ["changed", "controlled", "other model"])
def test_a_change_alters_no_loss(trained, name):
    """Nor does it draw random numbers, which dropout would draw."""
    found, wanted = trained[0][name], trained[0]["unchanged"]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)  # fp32
    assert found["random"] == wanted["random"]


def test_every_change_is_recorded(trained):
    samples = trained[0]["changed"]["samples"]
    changes = [
        (step, labels["before"], labels["after"], labels["why"])
        for step, labels in changes_of(trained, "changed")
    ]
    assert changes == [
        (2, "ddp", "pipeline", "--change 2:pipeline"),
        (4, "pipeline", "single", "--change 4:single"),
    ]
    assert {metric for metric, *_ in samples} == {
        "change_s", "change_predicted_s", "change_build_s", "change_step_predicted_s",
        "change_bytes", "change_predicted_bytes",
    }  # fmt: skip
    assert trained[1]["changed"]["spans"] == ["ddp to pipeline", "pipeline to single"]


def test_freezing_and_a_change_by_hand_go_together(trained):
    """Of the 4 layers of lenet, 2 are frozen after an interval and 3 after two."""
    assert strategies_after(trained, "frozen") == [
        (2, "ddp, 2 layers frozen"),
        (3, "pipeline, 2 layers frozen"),
        (4, "pipeline, 3 layers frozen"),
    ]
    wanted = trained[0]["unchanged"]["losses"]
    found = trained[0]["frozen"]["losses"]
    assert found[:3] == pytest.approx(wanted[:3], abs=1e-5)  # the loss precedes the update
    assert found[5] != pytest.approx(wanted[5], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # The last layers hold most of lenet: with 3 frozen, the rest is smaller than a stage was.
        ("shrunk", [
            "pipeline, 2 layers frozen",
            "pipeline of 2 x 1 ranks, 2 layers frozen",
            "pipeline of 2 x 1 ranks, 3 layers frozen",
            "pipeline of 1 x 2 ranks, 3 layers frozen",
        ]),
        # The second search finds nothing faster.
        ("searched again", [
            "pipeline, 2 layers frozen",
            "2 stages on 1-1 devices, 2 layers frozen",
            "2 stages on 1-1 devices, 3 layers frozen",
        ]),
    ],
)  # fmt: skip
def test_a_frozen_model_is_planned_again(trained, name, changes):
    # Measured times decide how a pipeline of this small model is named beside its stages.
    by_chance = r", (\d+ microbatches \(\w+\)|(convolutions|MLPs) on one device each)"
    found = [re.sub(by_chance, "", after) for _, after in strategies_after(trained, name)]
    assert found == changes
    wanted = trained[0]["frozen pipeline"]["losses"]
    assert trained[0][name]["losses"] == pytest.approx(wanted, abs=1e-5)


def test_each_change_has_the_predicted_steps_of_the_frozen_model(trained):
    steps_s = {
        (step, labels["side"]): value
        for metric, step, value, labels in trained[0]["frozen"]["samples"]
        if metric == "change_step_predicted_s"
    }
    assert sorted(steps_s) == [(step, side) for step in (2, 3, 4) for side in ("after", "before")]
    assert steps_s[2, "before"] > steps_s[2, "after"] == steps_s[3, "before"]
    assert steps_s[4, "before"] > steps_s[4, "after"]


def test_a_cached_run_equals_the_uncached_one_bit_for_bit(trained):
    """Rows beyond 20 KB are on disk; samples that no step has read are computed before the change;
    the outputs of 2 layers are the start when 3 are frozen, under the next strategy, too."""
    for rank in (0, 1):
        found, wanted = trained[rank]["cached"], trained[rank]["uncached"]
        assert found["random"] == wanted["random"]
        assert found["losses"] == wanted["losses"]
        assert found["digest"] == wanted["digest"]
        bytes_on = {
            (labels["place"], step): value
            for metric, step, value, labels in found["samples"]
            if metric == "cache_bytes"
        }
        assert bytes_on["disk", 6] > 0
    assert strategies_after(trained, "cached") == [
        (3, "ddp, 2 layers frozen"),
        (6, "ddp, 3 layers frozen, 2 cached"),
        (7, "pipeline, 3 layers frozen, 2 cached"),
        (9, "pipeline, 4 layers frozen, 3 cached"),
        (12, "pipeline, 4 layers frozen, 4 cached"),
    ]
    computed = [
        v for metric, _, v, _ in trained[0]["cached"]["samples"] if metric == "cache_computed"
    ]
    assert computed == [4, 0, 4, 4]
    predicted_s = {
        step: value
        for metric, step, value, _ in trained[0]["cached"]["samples"]
        if metric == "change_predicted_s"
    }
    assert predicted_s[3] == 0 < predicted_s[6]  # each rank of ddp lacks the rows of the other


def test_all_layers_are_trained_again_when_the_learning_rate_drops(trained):
    """The rate drops at step 10. The outputs of layers that are trained again are kept no more."""
    found, wanted = trained[0]["unfrozen cached"], trained[0]["unfrozen"]
    assert found["losses"] == wanted["losses"]
    assert found["digest"] == wanted["digest"]
    assert wanted["losses"][:11] == trained[0]["uncached"]["losses"][:11]
    assert [one for one in strategies_after(trained, "unfrozen cached") if one[0] >= 9] == [
        (9, "pipeline, 4 layers frozen, 3 cached"),
        (10, "pipeline"),
        (13, "pipeline, 2 layers frozen"),
    ]


def test_a_cache_that_does_not_pay_is_not_used(trained):
    """The first of two steps is timed, so the decision is the machine's; the losses are not."""
    found, wanted = trained[0]["cached where it pays"], trained[0]["uncached"]
    assert found["losses"] == wanted["losses"]


def test_a_cache_is_not_judged_before_a_step_is_timed():
    """After a change of strategy, the next engine has trained no step."""
    kept = object.__new__(TrainingCache)
    kept._case, kept._refused = replace(CASE, freeze="schedule", cache="auto"), set()
    recording = _RecordedFreeze(n_frozen=2, since=0, tap=SimpleNamespace(n_steps=0))
    assert not kept._is_worth(recording, None, None, 5)
    assert (recording.is_worth, kept._refused) == (None, set())


@pytest.mark.parametrize(("still_s", "is_worth"), [(4.9, True), (5.1, False)])
def test_a_cache_must_gain_more_than_its_change_stands_still(monkeypatch, still_s, is_worth):
    """Ten steps are left, and each gains half a second."""
    monkeypatch.setattr(cache, "broadcast_result", lambda make, *_: make())
    monkeypatch.setattr(cache, "maximum_over_ranks", lambda values, _: values)
    kept = object.__new__(TrainingCache)
    kept._case, kept._refused = replace(CASE, freeze="schedule", cache="auto"), set()
    kept._context = SimpleNamespace(world=SimpleNamespace(rank=0, size=1, is_first=True))
    kept._activations = Activations(1, 0, Path())
    monkeypatch.setattr(Activations, "survey", lambda *_: HeldRows((), np.zeros((1, 0, 1)), {}))
    changes = object.__new__(StrategyChanges)
    changes._current = Current(planned=None, still_s=still_s)
    changes._planner = SimpleNamespace(predict_change_s=lambda pair_bytes: 0.0)
    tap = SimpleNamespace(n_steps=1, step_s=lambda: 0.5)
    elastic = SimpleNamespace(values_at=lambda n_frozen: ())
    recording = _RecordedFreeze(n_frozen=2, since=0, tap=tap)
    assert kept._is_worth(recording, elastic, changes._still_s, 10) is is_worth
    assert kept._refused == (set() if is_worth else {2})


def test_bytes_are_predicted_exactly(trained):
    """From ddp nobody lacks anything; then rank 0 gets the second stage and its momentum."""
    moved, predicted = (
        {
            (step, labels["source"], labels["target"]): value
            for found, step, value, labels in trained[0]["changed"]["samples"]
            if found == metric
        }
        for metric in ("change_bytes", "change_predicted_bytes")
    )
    assert moved == predicted
    assert list(moved) == [(4, 1, 0)]
    assert 0 < moved[4, 1, 0] < 2 * 4 * N_PARAMETERS
    assert estimated_bytes("ddp", "pipeline") == {}
    assert estimated_bytes("pipeline", "single") == {(1, 0): moved[4, 1, 0]}
    frozen = estimated_bytes("pipeline", "single", n_frozen=3)
    assert 0 < frozen[1, 0] < moved[4, 1, 0]
    assert estimated_bytes("pipeline", "single", n_frozen=3, is_models=True) == frozen


def estimated_bytes(before, after, n_frozen=0, *, is_models=False):
    """Without engines, by the strategies alone; the optimizer has one state.

    Args:
        is_models: whether the model does not train the frozen layers.
    """
    graph = capture_graph(search_config_of(CASE))
    if is_models:
        for name in frozen_operators(graph, n_frozen):
            operator = graph.operators[graph.index()[name]]
            operator.attrs["frozen_bytes"] = operator.parameter_bytes
        n_frozen = 0
    rates = {"device": DeviceRates(flops_per_s=1e9, memory_bytes_per_s=1e9)}
    profile = roofline_profile(graph, rates, n_parts=(1, 2), n_microbatches=(1, 2))
    options = SimulatorOptions(frozen=frozen_operators(graph, n_frozen))
    simulator = Simulator(graph, profile, small_cluster(2), options=options)
    named = strategies_of(graph)
    return estimate_moved_bytes(simulator, named[before], named[after])


def test_a_rank_that_begins_to_read_the_cache_receives_all_rows():
    """Of the values between convolutions and linear layers."""
    graph = capture_graph(search_config_of(CASE))
    named = strategies_of(graph)
    single, ddp = named["single"], named["ddp"]
    assert estimate_cached_bytes(graph, 2, single, ddp, 40) == {(0, 1): 40 * 16 * 5 * 5 * 4}
    assert estimate_cached_bytes(graph, 2, ddp, single, 40) == {}
    assert estimate_cached_bytes(graph, 0, single, ddp, 40) == {}


def test_a_request_is_carried_out_and_answered(trained):
    answer = trained[0]["controlled"]["answer"]
    assert answer["error"] == ""
    assert "is the first by pipeline instead of ddp (control pipeline)" in answer["text"]
    assert trained[0]["controlled"]["spans"] == ["ddp to pipeline"]


def test_a_request_for_another_model_changes_nothing(trained):
    assert "it is for another model" in trained[0]["other model"]["answer"]["error"]
    assert trained[0]["other model"]["samples"] == []


def test_layers_that_freeze_in_less_than_an_epoch_are_not_cached(trained):
    """The outputs of two layers would be complete at step 5, but three are frozen at step 4."""
    assert strategies_after(trained, "frozen before cached") == [
        (2, "ddp, 2 layers frozen"),
        (3, "pipeline, 2 layers frozen"),
        (4, "pipeline, 3 layers frozen"),
    ]


def test_a_change_to_another_batch_is_refused_before_training(trained):
    wanted = "is for a batch of 24, the run has 12: a change keeps the global batch"
    assert trained[0]["other batch"].startswith("StrategyError: ")
    assert wanted in trained[1]["other batch"]


def test_a_change_that_asynchronous_training_cannot_make_is_refused_before_training(trained):
    wanted = "StrategyError: asynchronous training runs 1f1b, strategy 'single"
    assert trained[0]["other schedule"].startswith(wanted)


def test_a_second_controller_is_refused_until_the_first_has_its_answer(tmp_path):
    file = tmp_path / "next.json"
    file.write_text("{}")
    with pytest.raises(ResultsError, match=r"none/change.request.json on .* cannot be written: No"):
        write_request(tmp_path / "none", file)
    request = write_request(tmp_path, file)
    with pytest.raises(ConfigError, match="has a request already"):
        write_request(tmp_path, file)
    assert read_request(tmp_path) == request
    answer_request(tmp_path, ChangeAnswer(id=request.id, text="done"))
    assert read_answer(tmp_path, request) == ChangeAnswer(id=request.id, text="done")
    assert read_request(tmp_path) is None
    later = write_request(tmp_path, file)
    assert later.id != request.id
    answer_request(tmp_path, ChangeAnswer(id=request.id))  # whose controller has given up
    assert read_request(tmp_path) == later
    (tmp_path / REQUEST_FILE).write_text("{")
    answer_request(tmp_path, ChangeAnswer(id=UNREADABLE))
    assert read_request(tmp_path) is None
    assert read_answer(tmp_path, request) == ChangeAnswer(id=request.id, text="done")


def test_a_controller_needs_a_run_that_listens(tmp_path):
    with pytest.raises(ResultsError, match=r"holds no run.json: name the directory of a run"):
        control(ControlOptions(run=tmp_path / "none", strategy=tmp_path / "next.json"))
    write_header(tmp_path, local_header(["node0"]))
    with pytest.raises(ConfigError, match=r"is not running \(ok\): name a run that trains"):
        check_listens(tmp_path)


def test_the_slowest_nic_bounds_a_change():
    cluster = Cluster.uniform(3, 1, inside_bytes_per_s=1e6, memory_bytes=1, latency_s=0.5)
    assert predict_change_s(cluster, {}) == 0
    assert predict_change_s(cluster, {(0, 1): 1_000_000}) == 1.5  # latency and bytes
    # Both leave by the NIC of node 0: 4 MB at 1 MB/s.
    assert predict_change_s(cluster, {(0, 1): 2_000_000, (0, 2): 2_000_000}) == 4


def test_a_pipedream_plan_names_the_models_modules():
    """lenet has two children; the third module of the plan is the loss."""
    graph = capture_graph(search_config_of(CASE))
    stages = {"0": [0], "1": [1]}
    plan = PipeDreamPlan(module_to_stage_map=[0, 1, 1], stage_to_rank_map=stages)
    stage_of = stages_by_modules(plan, graph)
    assert {stage for name, stage in stage_of.items() if name.startswith("features")} == {0}
    assert {stage for name, stage in stage_of.items() if name.startswith("classifier")} == {1}
    assert stage_of["loss"] == 1
    longer = PipeDreamPlan(module_to_stage_map=[0] * 50 + [1], stage_to_rank_map=stages)
    with pytest.raises(StrategyError, match="has 51 modules, model 'lenet' has 2 children and"):
        stages_by_modules(longer, graph)


@pytest.mark.parametrize("is_after", [False, True])
def test_an_error_of_one_rank_ends_the_run(monkeypatch, is_after):
    """A disk that the cache has filled, or that is full when the new strategy is written."""
    changes = object.__new__(StrategyChanges)
    changes._next = Due(why="")
    elastic = SimpleNamespace(engine="old")

    def change(*_):
        if is_after:
            elastic.engine = "new"
            raise ResultsError("full")
        raise DataError("full")

    monkeypatch.setattr(changes, "_is_ready", lambda step: True)
    monkeypatch.setattr(changes, "_change", change)
    with pytest.raises(HarnessError, match="full"):
        changes.before_step(3, SimpleNamespace(elastic=elastic))


@pytest.mark.parametrize(("backend", "still_s"), [("gloo", 3), ("nccl", 5)])
def test_waiting_for_the_next_engine_counts_as_standing_still(
    tmp_path, monkeypatch, backend, still_s
):
    now_s, samples = [0.0], {}

    class Building:
        def exception(self):  # under NCCL training waits as soon as the build begins
            now_s[0] += 4

        def result(self):
            now_s[0] += 2 if backend == "gloo" else 0
            return SimpleNamespace(), 4.0, {}

    def switch(*_):
        now_s[0] += 1
        return None, {}, {}

    clock = SimpleNamespace(mark=lambda: now_s[0])
    recorder = SimpleNamespace(
        clock=clock, add_marks=lambda *marks, name: samples.update(span=marks),
        sample=lambda metric, value, **_: samples.update({metric: value}),
    )  # fmt: skip
    changes = object.__new__(StrategyChanges)
    strategy = SimpleNamespace(name="ddp", to_json=lambda: b"")
    changes._current = Current(planned=SimpleNamespace(strategy=strategy))
    world = SimpleNamespace(backend=backend, is_first=True)
    changes._context = SimpleNamespace(world=world, recorder=recorder, run_dir=tmp_path)
    changes._cache, changes._n_begun = None, 0
    changes._pool = SimpleNamespace(submit=lambda _: Building())
    module = "harness.workloads.train.changes."
    monkeypatch.setattr(module + "time.perf_counter", lambda: now_s[0])
    monkeypatch.setattr(module + "raise_on_all_ranks", lambda call, _: None)
    monkeypatch.setattr(module + "maximum_over_ranks", lambda values, _: values)
    monkeypatch.setattr(changes, "_take_first", lambda _: Due(why=""))
    monkeypatch.setattr(changes, "_switch", switch)
    monkeypatch.setattr(changes, "_record_transfer", lambda *_: 0.25)

    elastic = SimpleNamespace(predict_bytes=lambda _: {})
    changes._begin_next(2, elastic)
    now_s[0] += 10  # of steps
    changes._change(changes._next, 3, SimpleNamespace(), elastic)

    assert samples["change_s"] == still_s
    # A search's change avoids the wait, but not the build under NCCL.
    assert changes._current.still_s == {"gloo": 0.75, "nccl": 4.75}[backend]
    assert samples["span"][:3] == ("change", now_s[0] - 3 + 2 * (backend == "nccl"), now_s[0])

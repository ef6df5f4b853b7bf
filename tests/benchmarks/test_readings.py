"""The page of readings, made from benchmarks/figures/, and what benchmarks derive of their runs."""

import importlib
import json
import shutil
import sys
from math import nan

import msgspec
import pytest
from launching import ROOT
from made_runs import read_results

from harness.domain.prediction import STRATEGY_FILE
from harness.domain.strategy import OperatorPlan, Strategy
from harness.measure.store import read_header, write_header


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/, which later tests do not see."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if (ROOT / "benchmarks" / f"{name}.py").is_file():
            del sys.modules[name]


@pytest.fixture
def readings(load):
    return load("readings")


def test_page_in_docs_is_made_from_the_figures_in_the_tree(readings):
    page = (ROOT / "docs/readings.md").read_text(encoding="utf-8")

    assert page == readings.page(), "run: python benchmarks/readings.py >docs/readings.md"


def test_times_are_compared_to_the_same_epochs_and_to_the_accuracy_that_all_reach(load):
    """All reach 0.8: none after its second epoch, the others after their third."""
    elastic, cells = load("elastic"), load("searched_cells")
    place = cells.Place(cpu=(0.3,) * 5, bandwidth="100mbit")
    cell = cells.Cell(model=cells.MODELS["deep_vit"], place=place)
    runs = {
        "none": [elastic.Trained([10, 20, 30], [0.7, 0.85, 0.9], [])] * 2,
        "all": [
            elastic.Trained([10, 15, 18], [0.7, 0.75, 0.8], ["3: pipeline, 3 layers frozen"]),
            elastic.Trained([5, 9, 12], [0.6, 0.7, 0.82], []),
        ],
    }
    epochs, accuracy = elastic.judge(cell, runs)
    assert (epochs["name"], accuracy["name"]) == (
        "all, epochs 3, 100mbit",
        "all, accuracy to 0.800, 100mbit",
    )
    assert (epochs["low"], epochs["high"], epochs["n_pairs"]) == (30 / 18, 30 / 12, 2)
    assert (accuracy["low"], accuracy["high"]) == (20 / 18, 20 / 12)
    assert epochs["seconds_without"] == 30
    assert epochs["accuracy_with"] == {"median": 0.81, "low": 0.8, "high": 0.82}
    assert epochs["verdict"] == "inconclusive"  # two repeats decide nothing
    assert epochs["changes"] == ["3: pipeline, 3 layers frozen"]


PLAN = Strategy(name="pipeline", batch=8, operators={"a": OperatorPlan({}, [0])})


@pytest.fixture
def judging(load):
    return load("searched_judge")


def write_run(results, name, strategy, plan=None, *, engine="torch", status="ok", **config):
    """A run of the committed sample, as if by another strategy."""
    path = results / name
    shutil.copytree(ROOT / "results" / "sample-train-single-r0", path)
    header = read_header(path)
    told = {"strategy": strategy, "engine": engine, "schedule": "1f1b", "microbatches": 0, **config}
    told = {"run_id": name, "config": {**header.config, **told}, "status": status, "reason": "why"}
    write_header(path, msgspec.structs.replace(header, **told))
    if plan is not None:
        (path / STRATEGY_FILE).write_bytes(plan.to_json())
    return path


def test_only_pairs_that_rounds_tell_apart_have_an_order(judging):
    rounds = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9]
    slower = [2.0, 2.3, 1.9, 2.0, 2.3, 1.9]
    steps = {"a": rounds, "b": slower, "like a": rounds[::-1], "slow": [5.0, 5.5]}
    found = judging.distinct_pairs(steps)
    assert sorted(found) == [
        ("a", "b"), ("a", "slow"), ("b", "slow"), ("like a", "b"), ("like a", "slow")
    ]  # fmt: skip


def test_the_order_is_judged_by_pairs_and_regret(judging):
    strategies = {
        "a": {"predicted_s": 3.0, "measured_s": 1.0},
        "b": {"predicted_s": 2.0, "measured_s": 2.0},
        "c": {"predicted_s": 4.0, "measured_s": 4.0},
    }
    apart = [("a", "b"), ("b", "c")]
    assert judging.judge_order(strategies, apart) == {
        "rank_correlation": pytest.approx(0.5), "pairs_in_order": 1, "regret": 1.0, "chosen": "b",
        "median_absolute_error": 0.0,
    }  # fmt: skip


def scale_losses(run, factor):
    path = run / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("metric") == "loss":
            line["value"] *= factor
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_fp32_leaves_open_is_told_by_float64(judging, tmp_path, monkeypatch):
    runs = {
        "single": write_run(tmp_path, "a", "single"),
        "ddp": write_run(tmp_path, "b", "ddp"),
        "searched": write_run(tmp_path, "c", "searched", PLAN, engine="executor"),
    }
    scale_losses(runs["ddp"], 1 + 1e-5)
    scale_losses(runs["searched"], 1.01)
    told = {name: str(path) for name, path in runs.items()}
    measured = judging.Measured(runs=told, steps_s={"single": [1.0]})
    assert judging.left_open(measured) == ["searched"]
    found = {name: read_results(path).runs[0] for name, path in runs.items()}
    differences = judging.loss_differences(found)
    assert differences == pytest.approx({"single": 0, "ddp": 1e-5, "searched": 0.01}, abs=1e-9)
    assert not judging.trains_the_same(differences, {})
    assert not judging.trains_the_same(differences, {"searched": 1e-6})
    assert judging.trains_the_same(differences, {"searched": 1e-14})
    monkeypatch.setattr(judging, "losses", lambda run: [1.0, nan if run is found["ddp"] else 1.0])
    assert not judging.trains_the_same(judging.loss_differences(found), {})

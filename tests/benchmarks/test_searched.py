"""Which runs a cell compares, and what it says of a cell whose reference failed."""

import json
import shutil
import sys
from math import nan
from pathlib import Path

import msgspec
import pytest

from harness.domain.prediction import STRATEGY_FILE
from harness.domain.strategy import OperatorPlan, Strategy
from harness.measure.store import read_header, read_results, write_header

ROOT = Path(__file__).resolve().parents[2]
PLAN = Strategy(name="pipeline", batch=8, operators={"a": OperatorPlan({}, [0])})


@pytest.fixture
def judging(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import searched_judge

    yield searched_judge
    for name in ("searched_judge", "searched_cells", "comparison"):
        sys.modules.pop(name, None)


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

"""The zoo's verdicts: what equals one device is ok, anything else is wrong or refused."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "executor"))
from equivalence_training import merged
from model_zoo import Options, _judged, rows
from msgspec.structs import replace
from zoo.training import BATCH, ZOO, Planner, ZooCase, train_on_ranks, train_single

from harness.domain.strategy import OperatorPlan, Strategy
from harness.runtime.capture.capture import capture

WHOLE = [BATCH]


def case_of(model):
    return ZooCase(model=model, strategy=Strategy(name="none", batch=BATCH, operators={}))


def test_a_gradient_without_the_construct_is_wrong():
    found = train_single(case_of("detach"), WHOLE)
    row = _judged(case_of("plain"), found, WHOLE)
    assert row["status"] == "wrong"
    assert row["loss"] != row["single_loss"]


def test_what_one_device_refuses_is_wrong_to_train():
    found = train_single(case_of("plain"), WHOLE)
    row = _judged(case_of("tuple_output"), found, WHOLE)
    assert row["status"] == "wrong"
    assert (
        "one device refuses it: ModelError: the model returns an output of type tuple"
        in row["reason"]
    )


def test_narrow_models_are_judged_by_the_rounding_of_one_device():
    case = case_of("autocast")
    lost = train_single(case, WHOLE, has_construct=False)
    assert _judged(case, train_single(case, WHOLE), WHOLE)["status"] == "ok"
    assert _judged(case, lost, WHOLE)["status"] == "wrong"


@pytest.mark.parametrize(
    ("model", "strategy", "status"),
    [("plain", "zero_bubble", "ok"), ("sort_batch", "gpipe", "refused")],
)
def test_a_model_is_trained_right_or_refused(model, strategy, status, ranks):
    found = list(rows(Options(only=(model,), strategies=(strategy,), random=0), ranks))
    assert [(row["model"], row["status"]) for row in found] == [(model, status)]


def test_samples_are_cut_finer_than_another_operator_takes(ranks):
    name = "habit_neighbours"  # looks for two neighbours, which one sample does not have
    single = Planner(capture(ZOO[name].task(), BATCH, name).graph, 1).make("single")
    cut = dict.fromkeys(("a", "tanh"), OperatorPlan({"sample": BATCH}, [0, 1] * (BATCH // 2)))
    strategy = replace(single, operators={**single.operators, **cut})
    case = ZooCase(model=name, strategy=strategy)
    found = merged(ranks.run(2, train_on_ranks, case))
    assert _judged(case, found, WHOLE)["status"] == "ok"

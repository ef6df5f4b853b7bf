"""Devices that become slower are noticed, and the strategy changes where that pays."""

from dataclasses import replace
from types import SimpleNamespace

import planned_results
import pytest
import train_on_ranks
from local_ranks import run_on_ranks

from harness.domain.record import Span
from harness.plan.estimates import DeviceRates
from harness.workloads.train import replanning
from harness.workloads.train.config import TrainCase
from harness.workloads.train.next_plan import BesideSearch
from harness.workloads.train.plan import search_config_of
from harness.workloads.train.policy import Current
from harness.workloads.train.replanning import (
    N_SKIPPED,
    DeviceSpeeds,
    DriftPolicy,
    MeanComputeTime,
    largest_drift,
)

CASE = TrainCase(
    model="lenet", batch=12, n_samples=36, steps=100, warm_up=1, no_sync_steps=0, n_ranks=2,
    learning_rate=0.01, strategy="ddp", engine="executor", drift=True, search_budget=100,
)  # fmt: skip
CASES = {
    "still": replace(CASE, drift=False, controlled=True),
    "steady": CASE,
    "slowed": CASE,
    "insensitive": replace(CASE, drift_threshold=3.0),
}


def step(number, *parts):
    """A step's spans in a recorder's order: the step's own is first, because it starts first."""
    spans = [Span(kind=kind, step=number, start_s=0.0, duration_s=s) for kind, s in parts]
    return [Span(kind="step", step=number, start_s=0.0, duration_s=9.0), *spans]


def test_times_of_a_stage_are_a_weighted_mean_of_computing_alone():
    times = MeanComputeTime()
    for number in range(N_SKIPPED):
        times.take(step(number, ("forward", 7.0)))
    assert times.mean_s is None
    parts = ("forward", 1.0), ("communication", 5.0), ("backward", 2.0), ("optimizer", 1.0)
    times.take(step(N_SKIPPED, *parts))
    assert times.mean_s == 4.0
    times.take(step(N_SKIPPED + 1, ("forward", 14.0)))
    assert times.mean_s == pytest.approx(4.0 + 0.3 * 10)
    times.is_paused = True
    times.take(step(N_SKIPPED + 2, ("forward", 99.0)))
    assert times.mean_s == pytest.approx(7.0)


def test_the_speed_of_a_rank_is_known_when_its_mean_has_settled():
    speeds = DeviceSpeeds(3)
    assert not speeds.take([1.0, 2.0, 0.0])
    assert speeds.take([1.01, 2.0, 0.0])  # the base
    assert speeds.now == [1.0, 1.0, 1.0]
    assert speeds.take([1.01, 5.0, 0.0])  # the second one is on its way
    assert speeds.now == [1.0, 1.0, 1.0]
    assert not speeds.take([1.5, 5.9, 0.2])  # the first one and the third are, too
    assert speeds.take([1.01, 6.0, 0.0])
    assert speeds.now == pytest.approx([1.0, 1 / 3, 1.0])
    speeds.reset()  # by the next strategy, the slow device computes less
    assert not speeds.take([1.5, 1.5, 3.0])
    assert speeds.take([1.5, 1.5, 3.0])
    assert speeds.now == pytest.approx([1.0, 1 / 3, 1.0])
    assert speeds.take([1.5, 1.6, 3.0])
    assert speeds.now == pytest.approx([1.0, 1 / 3 * 1.5 / 1.6, 1.0])


@pytest.fixture
def alone(monkeypatch):
    """The policy of one rank, its current strategy, the searches that it has asked for, and
    answers that it will find."""
    asked, answers = [], []
    monkeypatch.setattr(replanning, "gather_numbers", lambda value, world: [value])
    monkeypatch.setattr(BesideSearch, "warm_up", lambda self: None)
    monkeypatch.setattr(BesideSearch, "start", lambda self, request: asked.append(request))
    monkeypatch.setattr(BesideSearch, "poll", lambda self: answers.pop() if answers else None)
    current = Current(planned=SimpleNamespace(strategy="ddp"))
    context = SimpleNamespace(
        recorder=SimpleNamespace(sample=lambda *_, **labels: None),
        world=SimpleNamespace(size=1, is_first=True),
    )
    planner = SimpleNamespace(
        set_speeds=lambda speeds: None,
        search_again=lambda n_frozen, start, n_skipped: (start, n_frozen, n_skipped),
    )
    inputs = SimpleNamespace(
        case=CASE, current=current, context=context, planner=planner, searches=[]
    )
    return DriftPolicy(inputs), current, asked, answers


def test_less_work_is_no_drift(alone):
    """Two layers freeze after step 30, and their outputs are cached after step 60."""
    policy, current, asked, _ = alone
    for number in range(1, 100):
        current.n_frozen, current.n_skipped = 2 * (number > 30), 2 * (number > 60)
        work_s = 4.0 - current.n_frozen / 2 - current.n_skipped
        policy._times.take(step(number, ("forward", work_s)))
        assert policy.due(number) is None
    assert policy._speeds.now == [1.0]
    assert not asked


def test_a_search_begins_anew_when_layers_have_frozen_meanwhile(alone):
    policy, current, asked, answers = alone
    for number in range(1, 100):
        current.n_frozen = 2 * (number > 75)
        policy._times.take(step(number, ("forward", 1.0 + (number > 30))))
        answers += ["for all layers"] * (number == 85)
        assert policy.due(number) is None
    assert asked == [("ddp", 0, 0), ("ddp", 2, 0)]


def test_another_policys_search_is_no_drift(alone):
    """It ends after step 55, and slows this rank."""
    policy, _, asked, _ = alone
    other = BesideSearch()
    policy._inputs.searches.append(other)
    for number in range(1, 100):
        other._asked = number <= 55 or None
        policy._times.take(step(number, ("forward", 1.0 + (number <= 55))))
        assert policy.due(number) is None
    assert policy._speeds.now == pytest.approx([1.0], rel=0.01)
    assert not asked


def test_drift_counts_alike_up_and_down():
    assert largest_drift([1.0, 1.0], [1.0, 0.5]) == pytest.approx(1.0)
    assert largest_drift([1.0, 0.5], [1.0, 1.0]) == pytest.approx(1.0)
    assert largest_drift([1.0], [1.0]) == 0.0


@pytest.fixture(scope="module")
def trained():
    """By rank: the samples of each case."""

    def beside(directory):
        rates = DeviceRates(flops_per_s=2e8, memory_bytes_per_s=5e9)
        planned_results.write_inputs(directory, search_config_of(CASE), 2, rates)

    return run_on_ranks(train_on_ranks.drifting_trainings, CASES, 2, beside)[0]


def samples(trained, name, metric):
    return [(at, value, labels) for m, at, value, labels in trained[0][name] if m == metric]


def test_a_slowed_device_gets_less_work(trained):
    speeds = {
        labels["rank"]: value for _, value, labels in samples(trained, "slowed", "drift_speed")
    }
    assert speeds[0] == pytest.approx(1.0)
    assert speeds[1] == pytest.approx(1 / 3, rel=0.05)
    predicted = {
        labels["side"]: value
        for _, value, labels in samples(trained, "slowed", "drift_step_predicted_s")
    }
    # Half the batch at a third of the speed, against three quarters at the whole: 1.5 to 0.75.
    assert predicted["change"] < 0.55 * predicted["stay"]
    ((at, _, labels),) = samples(trained, "slowed", "change_s")
    assert 50 < at <= 80
    assert labels["why"] == "drift to speeds 1.00, 0.33"
    sides = {
        labels["side"]: value
        for _, value, labels in samples(trained, "slowed", "change_step_predicted_s")
    }
    assert sides == pytest.approx(
        {"before": predicted["stay"], "after": predicted["change"]}, rel=1e-6
    )


@pytest.mark.parametrize("name", ["steady", "insensitive"])
def test_nothing_moves_without_drift(trained, name):
    assert not samples(trained, name, "drift_speed")
    assert not samples(trained, name, "change_s")


def test_a_change_by_drift_alters_no_loss(trained):
    wanted, found = (
        [value for _, value, _ in samples(trained, name, "loss")] for name in ("still", "slowed")
    )
    assert found == pytest.approx(wanted, abs=1e-4)  # fp32

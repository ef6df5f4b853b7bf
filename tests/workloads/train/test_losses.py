"""Losses of steps: when they are summed, and which end a run."""

import math
import time
from types import SimpleNamespace

import pytest
import torch

from harness.errors import VerificationError
from harness.workloads.train import losses
from harness.workloads.train.losses import LossLog


@pytest.fixture
def recorded():
    return {}


@pytest.fixture
def context(recorded):
    def sample(metric, value, *, step):
        recorded[step] = value

    return SimpleNamespace(world=SimpleNamespace(size=1), recorder=SimpleNamespace(sample=sample))


def train(log, steps, losses):
    for step, loss in zip(steps, losses, strict=True):
        log.add(step, torch.tensor(float(loss)))
        if step >= -1:
            log.end_step()
    return log


def test_losses_are_recorded_every_ten_seconds(context, recorded, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    log, found = LossLog(context), []
    for step in range(-2, 9):
        now_s += 4.0  # so three steps take more, and two less
        train(log, [step], [step])
        found.append(len(recorded))
    assert found == [0, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    log.record()
    assert log.values == [*range(9)]
    assert recorded == {step: step for step in range(9)}
    assert log.note == "loss 8, 4 s a step"


def test_a_rank_without_work_waits_as_often_as_the_others(context, recorded, monkeypatch):
    monkeypatch.setattr(losses.dist, "all_reduce", lambda found: None)
    monkeypatch.setattr(losses, "maximum_over_ranks", lambda own_s, world: [6.0 * len(log._kept)])
    context.world.size = 8
    log = LossLog(context)
    train(log, range(-1, 5), [1.0] * 6)
    assert list(recorded) == [0, 1, 2, 3]  # after every second step of 6 s


def test_a_run_without_warm_up_sums_its_first_loss(context, recorded):
    train(log := LossLog(context), [0], [3])
    assert recorded == {0: 3.0}
    train(log, [1], [2])
    assert recorded == {0: 3.0}


@pytest.mark.parametrize(
    ("losses", "first", "wanted"),
    [
        ([1, 2, math.inf], 0, "inf from step 1 on: lower --learning-rate"),
        ([1, math.nan, 2], 0, "nan from step 0 on: lower --learning-rate"),
        ([math.nan] * 3, 0, "nan from the first step on, whatever the learning rate: look for"),
        ([math.nan], 5, "nan from step 5 on: lower --learning-rate"),
    ],
)
def test_a_loss_that_is_not_finite_blames_the_learning_rate_after_an_update(
    context, losses, first, wanted
):
    """One step warms up, unless the run goes on."""
    log = LossLog(context, first)
    steps = range(first or -1, len(losses) + (first or -1))
    with pytest.raises(VerificationError, match=f"^the loss is {wanted}"):
        train(log, steps, losses).record()

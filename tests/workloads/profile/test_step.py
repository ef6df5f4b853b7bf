"""What whole steps and an optimizer's step are timed on."""

from types import SimpleNamespace

import pytest
import torch

from harness.runtime.capture.capture import capture_model
from harness.runtime.engines.optimizers import OptimizerOptions
from harness.runtime.models import build_task
from harness.runtime.models.task import ModelOptions
from harness.workloads.profile import step as plan_optimizer
from harness.workloads.profile.step import StepSampler, TimedParameters, optimizer_s_per_byte


def test_parameters_gradients_and_a_part_of_the_outputs_pass_between_two_steps():
    graph = capture_model("lenet", 8)
    parameters = sum(operator.parameter_bytes for operator in graph.operators)
    outputs = sum(operator.activation_bytes for operator in graph.operators)
    timed = TimedParameters.of(graph, 2)
    assert sum(timed.sizes) == parameters
    assert len(timed.sizes) == 5
    assert timed.n_between == pytest.approx(2 * parameters + outputs / 2)


def test_an_optimizer_is_timed_on_trained_parameters():
    graph = capture_model("lenet", 8)
    before = TimedParameters.of(graph, 1)
    weighted = [operator for operator in graph.operators if operator.parameter_bytes]
    for operator in weighted[:-1]:
        operator.attrs["frozen_bytes"] = operator.parameter_bytes
    timed = TimedParameters.of(graph, 1)
    assert timed.sizes == before.sizes[-1:]
    assert timed.n_between == before.n_between - sum(before.sizes[:-1])


def test_what_a_step_goes_through_passes_through_the_cache_before_each_update(monkeypatch):
    flushed = []

    class Flush:
        def __init__(self, device):
            assert device.type == "cpu"

        def __call__(self, n_bytes):
            flushed.append(n_bytes)

    monkeypatch.setattr(plan_optimizer, "CacheFlush", Flush)
    monkeypatch.setattr(plan_optimizer, "_MIN_TIME_S", 0.0)
    seconds = optimizer_s_per_byte(
        TimedParameters([4000, 8000], 7e6), OptimizerOptions(learning_rate=0.1), torch.device("cpu")
    )
    assert flushed == [7e6] * 3
    assert seconds > 0


def test_a_gpu_is_held_while_its_host_queues_an_optimizers_step(monkeypatch):
    calls = []
    monkeypatch.setattr(plan_optimizer, "hold_gpu", lambda: calls.append("hold"))
    monkeypatch.setattr(plan_optimizer, "_MIN_TIME_S", 0.0)
    optimizer = SimpleNamespace(step=lambda: calls.append("step"))
    seconds = plan_optimizer._gpu_step_s(
        optimizer, lambda: calls.append("flush"), torch.device("cpu")
    )
    held = plan_optimizer._N_HOLDS
    assert calls[: held + 2] == ["hold"] * held + ["flush", "step"]
    assert seconds > 0


class Clock:
    """Marks are seconds; counts how often the device was waited for."""

    def __init__(self):
        self.n_settled = 0

    def settle(self):
        self.n_settled += 1

    def seconds_at(self, mark):
        return mark


def test_steps_on_a_gpu_are_queued_behind_one_that_does_not_count(monkeypatch):
    clock = Clock()
    recorder = SimpleNamespace(clock=clock)
    sampler = StepSampler(
        build_task("lenet", ModelOptions(image_size=28, n_channels=1, n_classes=10)), 8, "fp32",
        torch.device("cpu"), recorder,
    )  # fmt: skip
    seconds = iter([9.0, 1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(sampler, "_is_queued", True)
    monkeypatch.setattr(sampler, "_step", lambda data: (0.0, next(seconds)))
    assert sampler._time(8) == 2.5
    assert clock.n_settled == 1

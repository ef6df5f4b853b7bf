"""What an optimizer's step is timed on."""

import pytest
import torch

from harness.runtime.capture.capture import capture_model
from harness.runtime.engines.optimizers import OptimizerOptions
from harness.workloads.profile import step as plan_optimizer
from harness.workloads.profile.step import TimedParameters, optimizer_s_per_byte


def test_parameters_gradients_and_a_part_of_the_outputs_pass_between_two_steps():
    graph = capture_model("lenet", 8)
    parameters = sum(operator.parameter_bytes for operator in graph.operators)
    outputs = sum(operator.activation_bytes for operator in graph.operators)
    timed = TimedParameters.of(graph, 2)
    assert sum(timed.sizes) == parameters
    assert len(timed.sizes) == 5
    assert timed.n_between == pytest.approx(2 * parameters + outputs / 2)


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

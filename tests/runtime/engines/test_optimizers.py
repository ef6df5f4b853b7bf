"""Learning rates by step, as a user of torch's schedulers has them, and fused optimizers."""

import pytest
import torch
from torch import nn

from harness.runtime.engines.optimizers import (
    OPTIMIZERS,
    LearningRates,
    OptimizerOptions,
    make_optimizer,
)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ("step", [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]),
        ("cosine", [0.1, 0.05, 0.0, 0.05, 0.1, 0.05]),  # beyond its period it rises
    ],
)
def test_rates_follow_the_schedule(schedule, wanted):
    rates = LearningRates(0.1, schedule, period=2, gamma=0.5)
    assert rates.at(4) == pytest.approx(wanted[4])  # steps in between are passed
    assert [rates.at(step) for step in range(6)] == pytest.approx(wanted)
    assert rates.at(-3) == 0.1  # a warm-up step


def test_the_first_step_of_a_drop_is_found():
    rates = LearningRates(0.1, "step", period=10, gamma=0.1)
    assert rates.first_drop(10, start=0, stop=50) == 10
    assert rates.first_drop(10, start=10, stop=50) == 20
    assert rates.first_drop(100, start=0, stop=50) == 20
    assert rates.first_drop(100, start=0, stop=20) is None


def test_the_rate_rises_before_its_schedule():
    rates = LearningRates(0.4, "step", period=2, gamma=0.1, n_rising=4)
    found = [rates.at(step) for step in range(-1, 8)]
    assert found == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.04, 0.04])
    assert rates.first_drop(10, start=0, stop=8) == 6


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "is_fused"), [(torch.float32, True), (torch.complex64, None)])
def test_on_a_gpu_an_optimizer_is_fused_unless_a_parameter_is_complex(name, dtype, is_fused):
    model = nn.ParameterList([torch.ones(2), torch.ones(2, dtype=dtype)])
    optimizer = make_optimizer(
        model.named_parameters(), OptimizerOptions(name=name), torch.device("cuda")
    )
    assert optimizer.defaults["fused"] is is_fused
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((parameter < 1).all() for parameter in torch.view_as_real(model[1].detach() + 0j))

"""Learning rates by step, as a user of torch's schedulers has them, and fused optimizers."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness.errors import ConfigError
from harness.runtime.engines.optimizers import (
    OPTIMIZERS,
    LearningRates,
    OptimizerOptions,
    average_of,
    checked_optimizer,
    kept_keys,
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averages_are_those_of_torch(name):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    options = OptimizerOptions(name=name, ema=0.8)
    optimizer = make_optimizer(model.named_parameters(), options, torch.device("cpu"))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    averaged.update_parameters(model)  # the first copies
    for step in range(3):
        optimizer.zero_grad()
        used = model if step else model[0]  # the last bias has no gradient in the first step
        used(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    found = [average_of(optimizer, parameter) for parameter in model.parameters()]
    torch.testing.assert_close(found, [p.detach() for p in averaged.module.parameters()])
    assert not torch.equal(found[3], model[1].bias)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_fp16_that_is_skipped_moves_no_average(name):
    parameter = nn.Parameter(torch.ones(2))
    options = OptimizerOptions(name=name, ema=0.5)
    optimizer = make_optimizer([("", parameter)], options, torch.device("cuda"))
    found = []
    for is_skipped in (0.0, 1.0, 0.0):
        optimizer.found_inf = torch.tensor(is_skipped)
        parameter.grad = torch.ones(2)
        optimizer.step()
        found.append(average_of(optimizer, parameter).clone())
    assert torch.equal(found[0], found[1])
    assert (found[2] < found[1]).all()
    assert (found[1] < 1).all()


def test_parts_of_one_name_that_a_dict_has_lost_are_named():
    named = [("w", nn.Parameter(torch.ones(1))) for _ in range(3)]
    with pytest.raises(ConfigError, match=r"1 of 3 .*, w is missing: a dict .* one of its 3 parts"):
        checked_optimizer(lambda own: torch.optim.SGD(dict(own).values(), lr=0.1), named)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_factory_that_hooks_the_part_of_a_gradient_is_refused(register):
    own = nn.Linear(2, 2)
    own.weight.register_post_accumulate_grad_hook(print)  # the executor's

    def hook(named):
        getattr(named[1][1], register)(print)
        return torch.optim.SGD(named)

    with pytest.raises(ConfigError, match=r"gradient of bias, .*register_step_pre_hook$"):
        checked_optimizer(hook, list(own.named_parameters()))


@pytest.mark.parametrize(
    ("ema", "kept"), [(0.9, {"average", "momentum_buffer"}), (None, {"momentum_buffer"})]
)
def test_a_saved_average_is_left_out_where_none_is_kept(ema, kept):
    parameters = nn.Linear(1, 1).named_parameters()
    optimizer = make_optimizer(parameters, OptimizerOptions(ema=ema), torch.device("cpu"))
    state = {1: {"average": torch.ones(1), "momentum_buffer": torch.ones(1)}}
    assert kept_keys(optimizer, state) == kept


def test_a_state_that_lacks_a_part_of_one_parameter_is_refused():
    options = OptimizerOptions(name="adamw")
    optimizer = make_optimizer(nn.Linear(1, 1).named_parameters(), options, torch.device("cpu"))
    whole = {"step": 1, "exp_avg": 1, "exp_avg_sq": 1}
    with pytest.raises(ConfigError, match="has exp_avg of a parameter, this optimizer keeps exp_a"):
        kept_keys(optimizer, {0: whole, 1: {"step": 1, "exp_avg": 1}})

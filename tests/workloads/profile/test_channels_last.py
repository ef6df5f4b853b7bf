"""Profiles of models in channels-last order."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.workloads.planning.config import ProfileConfig, SearchConfig
from harness.workloads.profile import workload as profile

LENET = ProfileConfig(model="lenet", batch_size=4, dtype="bf16", channels_last=True)


@pytest.mark.parametrize("is_asked", [True, False])
def test_operators_get_the_order_that_training_gives_them(is_asked):
    config = replace(LENET, channels_last=is_asked)
    world = SimpleNamespace(device=torch.device("cpu"), size=1)
    task, captured = profile._prepare(config, SimpleNamespace(world=world))
    orders = []

    def look(module, inputs, output):
        orders.append(output.is_contiguous(memory_format=torch.channels_last))

    convolutions = [m for m in captured.module.modules() if isinstance(m, nn.Conv2d)]
    for convolution in convolutions:
        convolution.register_forward_hook(look)
    captured.module(torch.randn(4, *task.inputs[0].shape))
    assert orders == [is_asked] * len(convolutions)
    assert orders


def test_each_order_has_a_profile_of_its_own():
    both = replace(LENET, compile=True)
    plain = replace(LENET, channels_last=False)
    names = [config.path(Path("results")).name for config in (plain, LENET, both)]
    assert names == [
        "profile-lenet-bf16.json",
        "profile-lenet-bf16-channels_last.json",
        "profile-lenet-bf16-channels_last-compiled.json",
    ]


def test_planning_takes_the_profile_of_its_order():
    search = SearchConfig(model="lenet", batch_size=4, dtype="bf16", channels_last=True)
    assert search.profile_config().path(Path()) == LENET.path(Path())

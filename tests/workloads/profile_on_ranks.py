"""What the tests of the profile workload run on local ranks, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.domain.profile import Profile
from harness.runtime.context import Context
from harness.runtime.op_timer import OperatorCall, OpTimer
from harness.workloads.profile import run_profile


def large_linear(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """Of its linear layers the second is large and has a gradient to hand back."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(n_channels * image_size**2, 1024),
        nn.Linear(1024, 1024),
        nn.Linear(1024, n_classes),
    )


def profile_kinds(argument: Any, context: Context) -> dict[str, Any]:
    """Profile with the kinds of device given by rank."""
    config, kinds = argument
    world = replace(context.world, device_kind=kinds[context.world.rank])
    return run_profile(config, replace(context, world=world))


def profile_twice(config: Any, context: Context) -> list[dict[str, Any]]:
    """Profile, then with one more number of shards, then again; with what the step took lately."""
    more = replace(config, shards=(*config.shards, 4))
    found = []
    for one in (config, more, more):
        summary = run_profile(one, context)
        steps = Profile.load(Path(config.profile_file)).whole_steps
        found.append(summary | {"latest_s": {step.batch: step.latest_s for step in steps}})
    return found


def profile_without_memory(argument: Any, context: Context) -> dict[str, Any]:
    """Profile where one operator runs out of memory."""
    config, name = argument
    measure = OpTimer.measure

    def fail(
        self: OpTimer, call: OperatorCall, what: str = "operator", *told: Any, **by: Any
    ) -> Any:
        if repr(name) in what:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return measure(self, call, what, *told, **by)

    OpTimer.measure = fail  # type: ignore[method-assign]
    try:
        return run_profile(config, context)
    finally:
        OpTimer.measure = measure  # type: ignore[method-assign]

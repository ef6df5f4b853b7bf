"""What the tests of the profile workload run on local ranks, by name."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.profile import Measurement, Profile
from harness.runtime.profiling.subgraph import OperatorCall
from harness.runtime.ranks.world import Context
from harness.workloads.planning.config import Point
from harness.workloads.profile import measure as profile_measure
from harness.workloads.profile import workload as profile
from harness.workloads.profile.measure import PointMeasurer
from harness.workloads.profile.workload import run_profile


class _Masked(nn.Module):
    """Attention with a causal mask of minus infinity, as nanoGPT writes it."""

    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        self.inward, self.head = nn.Linear(width, 3 * width), nn.Linear(width, n_classes)
        self.register_buffer("mask", torch.tril(torch.ones(width, width)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x.flatten(1, 2)).chunk(3, 2)
        scores = (q @ k.transpose(1, 2)).masked_fill(self.mask == 0, float("-inf"))
        return self.head((scores.softmax(2) @ v).mean(1))


def masked(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    assert n_channels == 1
    return _Masked(image_size, n_classes)


def profile_kinds(argument: Any, context: Context) -> dict[str, Any]:
    """Profile with the kinds of device given by rank."""
    config, kinds = argument
    world = replace(context.world, device_kind=kinds[context.world.rank])
    return run_profile(config, replace(context, world=world))


def profile_twice(config: Any, context: Context) -> list[dict[str, Any]]:
    """Profile, then with one more number of shards, then again; with the step of each."""
    more = replace(config, shards=(*config.shards, 4))
    found = []
    for one in (config, more, more):
        summary = run_profile(one, context)
        steps = Profile.load(Path(config.profile_file)).whole_steps
        found.append(summary | {"step_s": {step.batch: step.step_s for step in steps}})
    return found


def profile_beside_a_slow_rank(config: Any, context: Context) -> dict[str, Any]:
    """Profile on two kinds of device; rank 1's takes longer than a collective may."""
    measure = PointMeasurer.measure

    def slowly(self: PointMeasurer, points: Sequence[Point]) -> list[Measurement]:
        if context.world.rank == 1:
            time.sleep(1.5)
        return measure(self, points)

    kinds = ["fast", "slow"]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    with mock.patch.object(PointMeasurer, "measure", slowly):
        found = profile_kinds((config, kinds), context)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60))
    return found


def _profile_until(config: Any, context: Context, n_batches: int) -> str:
    """The file's text as a run leaves it that is killed after so many sizes of batch."""
    gather = profile._Profiler._gather
    calls: list[Any] = []

    def die(self: Any, found: Any) -> Any:
        if len(calls) == n_batches:
            raise KeyboardInterrupt
        calls.append(found)
        return gather(self, found)

    with mock.patch.object(profile._Profiler, "_gather", die), pytest.raises(KeyboardInterrupt):
        run_profile(config, context)
    return Path(config.profile_file).read_text()


def profile_killed_and_again(config: Any, context: Context) -> tuple[str, Any, str]:
    """What a run left that was killed in its second of two rounds; a whole run after it, and what
    that left."""
    left = _profile_until(config, context, n_batches=3)
    summary = run_profile(config, context)
    return left, summary, Path(config.profile_file).read_text()


def profile_without_memory(argument: Any, context: Context) -> dict[str, Any]:
    """Profile where one operator runs out of memory."""
    config, name = argument
    verify = profile_measure.verify

    def fail(call: OperatorCall, what: str, *rest: Any) -> int:
        if repr(name) in what:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return verify(call, what, *rest)

    with mock.patch.object(profile_measure, "verify", fail):
        return run_profile(config, context)

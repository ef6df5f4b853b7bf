"""Which gradients are summed together: as DistributedDataParallel does by itself."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn

from harness.domain.sharding import FIRST_BUCKET_BYTES
from harness.runtime.executor.gradients import bucketed

_CAP = 25 << 20


def test_buckets_are_those_of_ddp():
    draw = random.Random(0)
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_BYTES
    for _ in range(50):
        sizes = [2 ** draw.randrange(24) for _ in range(draw.randrange(1, 30))]
        parameters = [nn.Parameter(torch.empty(n, device="meta")) for n in sizes]
        tensors = [torch.empty(1).expand(n) for n in sizes]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET_BYTES, _CAP])
        number = {parameter: i for i, parameter in enumerate(parameters)}
        assert [[number[p] for p in one] for one in bucketed(parameters, _CAP)] == theirs

"""The update of weights, without other ranks."""

import pytest
import torch
import torch.distributed as dist
from made_runs import world_of

from harness.runtime.executor.gradients.update import LossScale


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("overflow", [0.0, float("inf")])
def test_a_fused_optimizer_skips_a_step_that_overflows_on_some_rank(overflow, one_rank):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scale = LossScale("fp16", world_of(0, 2))
    (scale.factor() * weight.sum() + overflow * weight[0]).backward()
    scale.unscale(optimizer, is_muted=False)
    scale.step(optimizer, is_muted=False)
    assert weight.equal(torch.ones(3)) == (overflow > 0)
    assert optimizer.state[weight]["step"] == (0 if overflow else 1)

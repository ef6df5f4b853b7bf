"""Parameters that a loss does not depend on, for which DistributedDataParallel would wait."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.runtime.capture.meta_copy import fake, fake_copy, forgotten_stand_ins
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.models.task import Task

_N_SAMPLES = 2


def unread_parameters(task: Task) -> tuple[str, ...]:
    """Names of the trained parameters that the loss of a batch has no gradient of.

    Forward and backward run on tensors without data. Empty for a model that reads their values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = next(task.model.parameters()).device
    batch = draw_batch(task, _N_SAMPLES, 0, device)
    with forgotten_stand_ins():
        try:
            model = fake_copy(task.model, mode)
            inputs = [fake(x, mode) for x in batch.inputs]
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            with mode:
                loss = task.sum_loss(model(*inputs), fake(batch.targets, mode))
                found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        except Exception:  # of any operator that asks for a value
            return ()
    pairs = zip(trained, found, strict=True)
    return tuple(name for name, gradient in pairs if gradient is None)

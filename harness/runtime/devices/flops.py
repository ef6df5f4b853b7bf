"""Count the FLOPs of a training step by running forward and backward on fake tensors."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.runtime.capture.flop_counts import FlopCounts
from harness.runtime.capture.meta_copy import fake_copy
from harness.runtime.models.task import InputSpec, Task

_log = logging.getLogger(__name__)


class StepFlops(NamedTuple):
    """FLOPs of a step, and how many of them multiply activations with each other."""

    total: float
    scores: float


def _empty_input(spec: InputSpec, n_samples: int) -> Tensor:
    return torch.empty((n_samples, *spec.shape), dtype=spec.dtype)


def _count_flops(task: Task, n_samples: int) -> StepFlops:
    """FLOPs of forward, loss and backward.

    A multiplication and an addition count as two. The gradient of the model's input is not
    computed, so it does not count. Source: torch.utils.flop_counter.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = replace(task, model=fake_copy(task.model, mode))
    device = next((p.device for p in copied.model.parameters()), torch.device("cpu"))
    # The counter knows the products of the plain attention on every device.
    with mode, device, sdpa_kernel(SDPBackend.MATH), FlopCounts() as counter:
        inputs = [_empty_input(spec, n_samples) for spec in task.inputs]
        targets = task.draw_targets(n_samples, device=device)
        copied.sum_loss(copied.model(*inputs), targets).backward()
    return StepFlops(counter.total, counter.of_activations)


def step_flops(task: Task, n_samples: int) -> StepFlops | None:
    """FLOPs of one training step over `n_samples`; None if the model needs real values.

    Fake tensors have shapes only, so neither times nor memory peaks of the run change.
    """
    try:
        return _count_flops(task, n_samples)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        _log.warning("FLOPs are not counted, the model needs real values: %s", error)
        return None

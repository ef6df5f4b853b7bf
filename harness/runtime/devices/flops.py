"""Count the FLOPs of a training step by running forward and backward on the meta device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from harness.runtime.capture.flop_counts import FlopCounts
from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.models.task import InputSpec, Task

_log = logging.getLogger(__name__)
_META = torch.device("meta")


class StepFlops(NamedTuple):
    """FLOPs of a step, and how many of them multiply activations with each other."""

    total: float
    scores: float


def _empty_input(spec: InputSpec, n_samples: int) -> Tensor:
    return torch.empty((n_samples, *spec.shape), dtype=spec.dtype, device=_META)


def count_flops(task: Task, n_samples: int) -> StepFlops:
    """FLOPs of forward, loss and backward of a task whose model is on the meta device.

    A multiplication and an addition count as two. The gradient of the model's input is not
    computed, so it does not count. Source: torch.utils.flop_counter.
    """
    inputs = [_empty_input(spec, n_samples) for spec in task.inputs]
    with FlopCounts() as counter:
        task.sum_loss(task.model(*inputs), task.draw_targets(n_samples, device=_META)).backward()
    return StepFlops(counter.total, counter.of_activations)


def _on_meta(task: Task, build: Callable[[], Task]) -> Task:
    """Build the model on the meta device, or copy it there if the factory does not support it."""
    try:
        with _META:
            return build()
    except Exception as error:
        _log.info("the model cannot be built on the meta device, so it is copied there: %s", error)
    return replace(task, model=meta_copy(task.model))


def step_flops(task: Task, build: Callable[[], Task], n_samples: int) -> StepFlops | None:
    """FLOPs of one training step over `n_samples`; None if the model needs real values.

    The meta device computes shapes only, so neither times nor memory peaks of the run change.

    Args:
        build: builds the same task again, on the current default device.
    """
    try:
        return count_flops(_on_meta(task, build), n_samples)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        _log.warning("FLOPs are not counted, the model needs real values: %s", error)
        return None

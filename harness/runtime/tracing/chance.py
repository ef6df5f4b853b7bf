"""Detect random numbers drawn during tracing, because a graph would keep one draw for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from harness.runtime.tracing.constructs import ConstructError


@contextmanager
def no_random_draws() -> Iterator[None]:
    """Refuse random draws in the block, such as those that choose which layers run.

    Raises:
        ConstructError: a number was drawn by PyTorch, NumPy or Python.
    """
    before = _states()
    yield
    drawn = [name for name, state in _states().items() if state != before[name]]
    if drawn:
        raise ConstructError(
            f"forward draws random numbers ({drawn[0]}) that decide what is computed, such as "
            "which layers run, or whose shape does not depend on the input: a graph would keep one "
            "draw; draw by functions of the input (torch.rand_like, F.dropout)"
        )


def _states() -> dict[str, object]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy": (np.asarray(keys).tobytes(), position),
    }

"""Computing by a model in training, without an effect on what it trains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from harness.runtime.devices.random_sources import RandomSources
from harness.runtime.engines.engine import Clip


@contextmanager
def kept_alike(written: Iterable[Tensor]) -> Iterator[None]:
    """Restore the contents of buffers, and the random state, on exit."""
    buffers = list(written)
    copies, random = [buffer.clone() for buffer in buffers], RandomSources()
    try:
        yield
    finally:
        random.restore()
        for buffer, copied in zip(buffers, copies, strict=True):
            buffer.copy_(copied)


@contextmanager
def without_updates(optimizer: Optimizer, clip: Clip, written: Iterable[Tensor]) -> Iterator[None]:
    """Let steps compute the norm of their gradients, and change neither parameters nor the
    optimizer's state; `kept_alike` for the rest."""
    most, clip.most = clip.most, math.inf
    optimizer.step = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    try:
        with kept_alike(written):
            yield
    finally:
        del optimizer.step
        clip.most = most

"""A step that exchanges and updates nothing, before the first that does.

Under NCCL a receive that was posted ahead keeps the GPU busy until its message comes. What waits
for all of the GPU meanwhile waits for ever, since the sender may be waiting for us. The first call
of a convolution does so (cuDNN tries its algorithms), that of a kernel which is yet to be loaded,
and an allocator that runs short. A rehearsal gets all that over with:

    rehearsal, muted: forward | backward         step: post receives | forward | backward | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from harness.runtime.executor.run.randomness import random_state, repeated
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.ranks.world import World


def is_needed(world: World) -> bool:
    """Whether a message on its way could keep this rank's first step from going on."""
    return world.backend == "nccl" and world.size > 1


def rehearse(
    step: Callable[[], None], channels: Channels, weights: nn.Module, written: Iterable[Tensor]
) -> None:
    """Run a step without messages; no rank waits for another.

    Args:
        step: updates nothing.
        weights: their gradients are forgotten.
        written: buffers that a step changes; they, and what is drawn, stay as they were.
    """
    device = channels.buffers.device
    with repeated(random_state(device), device), _kept(list(written)):
        channels.is_muted = True
        try:
            step()
        finally:
            channels.is_muted = False
    weights.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _kept(buffers: list[Tensor]) -> Iterator[None]:
    """Give buffers back what they had."""
    copies = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, copied in zip(buffers, copies, strict=True):
            buffer.copy_(copied)

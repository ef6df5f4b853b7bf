"""Prime a rank by a step without communication or update, before the first real step.

Under NCCL a receive that is posted ahead occupies the GPU until its message arrives. An operation
that synchronizes the whole GPU then deadlocks, because the sender may wait for this rank. The first
call of a convolution synchronizes (cuDNN tries its algorithms), as does the first call of a kernel
(it is loaded), and an allocator without free memory. Priming makes these first calls:

    priming, muted: forward | backward         step: post receives | forward | backward | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from harness.runtime.devices.sampling import settle
from harness.runtime.executor.gradients.sums import GradientSync
from harness.runtime.executor.run.flight import random_state, repeated
from harness.runtime.executor.run.runner import Runner
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.ranks.world import World


def is_needed(world: World, *, is_compiled: bool) -> bool:
    """Whether a pending receive could block this rank's first step, or whether ranks would compile
    one after the other."""
    return (world.backend == "nccl" or is_compiled) and world.size > 1


def prime(
    run: Callable[[], None],
    sync: GradientSync,
    runner: Runner,
    channels: Channels,
    weights: nn.Module,
) -> None:
    """Run a step without messages and update; ranks do not wait for each other.

    Args:
        run: runs the actions of a step.
        weights: module whose gradients are cleared afterwards.
    """
    device = channels.buffers.device
    with kept_alike(runner.buffers(), device):
        channels.is_muted = True
        try:
            sync.start_step(is_muted=True)
            run()
            sync.finish()
            runner.forget()
        finally:
            channels.is_muted = False
    weights.zero_grad(set_to_none=True)
    settle(device)


@contextmanager
def kept_alike(written: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Restore the contents of buffers, and the random state, on exit."""
    buffers = list(written)
    copies = [buffer.clone() for buffer in buffers]
    try:
        with repeated(random_state(device), device):
            yield
    finally:
        for buffer, copied in zip(buffers, copies, strict=True):
            buffer.copy_(copied)

"""Prime a rank by a step without communication or update, before the first real step.

Under NCCL a receive that is posted ahead occupies the GPU until its message arrives. An operation
that synchronizes the whole GPU then deadlocks, because the sender may wait for this rank. The first
call of a convolution synchronizes (cuDNN tries its algorithms), as does the first call of a kernel
(it is loaded), and an allocator without free memory. Priming makes these first calls:

    priming, muted: forward | backward         step: post receives | forward | backward | ...

The first evaluation is primed likewise, since it calls other kernels. So is the optimizer where it
updates beside receives, in asynchronous training: by copies of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from harness.runtime.devices.sampling import settle
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.engines.standstill import kept_alike
from harness.runtime.executor.gradients.sums import GradientSync
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
    update: Callable[[], None] | None,
) -> None:
    """Run a step without messages and update; ranks do not wait for each other.

    Args:
        run: runs the actions of a step.
        weights: module whose gradients are cleared afterwards.
        update: primes an update; None if receives never wait beside one.
    """
    with kept_alike(runner.buffers()), muted(channels):
        sync.start_step(is_muted=True)
        run()
        sync.finish()
        sync.prime()
        runner.forget()
        if update is not None:
            update()
    weights.zero_grad(set_to_none=True)


def prime_update(
    parameters: Sequence[tuple[str, nn.Parameter]], options: OptimizerOptions, device: torch.device
) -> None:
    """Update copies of parameters by an optimizer of their own."""
    copies = [(name, nn.Parameter(parameter.detach().clone())) for name, parameter in parameters]
    optimizer = make_optimizer(copies, options, device)
    for _ in range(2):  # the first update makes the optimizer's state
        for _, copied in copies:
            copied.grad = torch.zeros_like(copied)
        optimizer.step()


@contextmanager
def muted(channels: Channels) -> Iterator[None]:
    """Let this rank neither send nor wait in the block; its device ends all work of it."""
    channels.is_muted = True
    try:
        yield
        settle(channels.device)
    finally:
        channels.is_muted = False

"""Process groups of one engine: all ranks make the same groups, and destroy them together."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import WITHOUT_PLAN, ConfigError, StrategyError
from harness.runtime.ranks.world import World

# Streams in PyTorch's pool (kStreamsPerPool in c10/cuda/CUDAStream.cpp), assigned round-robin.
_N_STREAMS = 32
# Elements of the sums that connect a group: 4 B, 64 KiB, 1 MiB and 16 MiB.
_PROBED = (1, 1 << 14, 1 << 18, 1 << 22)
# The number of hardware queues, 8 if unset; streams that share a queue wait for each other.
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


class Groups:
    """Makes process groups; all ranks must make the same groups in the same order. Each method
    raises StrategyError if under NCCL a rank then has too many.

    NCCL connects the ranks of a group at its first use, and again at the first use of each of its
    algorithms (rings or trees, for example), which it chooses by operation and size. It then blocks
    the host until all ranks do the same: a gradient's sum could wait for a rank that waits for a
    message of this rank. So every group is used when it is made, as it will be used. Each group has
    a CUDA stream, which runs work in order; two groups with the same stream could deadlock.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        """Make none yet.

        Raises:
            ConfigError: under NCCL, a call to the GPU waits until it is carried out.
        """
        self.timeout_s = timeout_s
        self._world, self._timeout = world, timedelta(seconds=timeout_s)
        self._is_nccl = world.backend == "nccl"
        if self._is_nccl and world.size > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise ConfigError(
                "CUDA_LAUNCH_BLOCKING=1 makes a receive that is posted ahead wait for its message: "
                f"unset it, or {WITHOUT_PLAN}"
            )
        self._made: list[Any] = []
        self._n_of: Counter[int] = Counter()  # by rank

    def for_sums(self, devices: tuple[int, ...], *, is_quantized: bool = False) -> Any:
        """A group for all-reduces over devices.

        Args:
            is_quantized: they are those of `ranks.quantized_sums`, which are messages.
        """
        if is_quantized:
            return self.for_exchanges(devices)
        group = self._make(devices)
        if self._is_nccl and self._world.rank in devices:
            for n_elements in _PROBED:
                dist.all_reduce(self._probe(n_elements), group=group)
        return group

    def for_exchanges(self, devices: tuple[int, ...]) -> Any:
        """A group for messages among devices, and for sums."""
        group = self.for_sums(devices)
        if self._is_nccl and self._world.rank in devices:
            # A sum connects some ranks only, and not for messages.
            others = [device for device in devices if device != self._world.rank]
            ways = [(way, device) for device in others for way in (dist.isend, dist.irecv)]
            messages = [dist.P2POp(way, self._probe(), device, group) for way, device in ways]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
        return group

    def for_gradients(
        self, devices: tuple[int, ...], *, is_scattered: bool = False, is_quantized: bool = False
    ) -> Any:
        """A group for gradients of replicated weights; torch's default group for all devices, where
        an agent ends a wait.

        Args:
            is_scattered: they are summed to their owners.
            is_quantized: see `for_sums`.
        """
        # NCCL's default group was made before, and may share its stream with a new group.
        is_default = not (self._is_nccl or self._world.is_bounded)
        if len(devices) == self._world.size and is_default:
            return dist.group.WORLD
        group = self.for_sums(devices, is_quantized=is_quantized)
        if is_scattered and self._is_nccl and self._world.rank in devices:
            for n_elements in _PROBED:
                part = self._probe(max(1, n_elements // len(devices)))
                scatter_sum(part, self._probe(len(part) * len(devices)), group)
                # Parts of unlike sizes are reduced one by one.
                dist.reduce(self._probe(n_elements), devices[0], group=group)
        return group

    def for_transfers(self, sender: int, reader: int) -> Any:
        """A group for messages from one rank to another.

        Raises:
            ConfigError: under NCCL, receives that are posted ahead could share hardware queues.
        """
        n_queues = os.environ.get(_QUEUES, "8")
        if self._is_nccl and n_queues != "32":
            raise ConfigError(
                f"{_QUEUES} is {n_queues}, so streams that share a hardware queue wait for each "
                "other's receives: set it to 32 before the program starts"
            )
        group = self._make((sender, reader))
        if self._is_nccl and self._world.rank == sender:
            dist.send(self._probe(), reader, group=group)
        elif self._is_nccl and self._world.rank == reader:
            dist.recv(self._probe(), sender, group=group)
        return group

    def close(self) -> None:
        """Destroy all groups, after every rank has finished their communication."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()

    def _make(self, devices: tuple[int, ...]) -> Any:
        self._n_of.update(devices)
        rank, n_groups = self._n_of.most_common(1)[0]
        if self._is_nccl and n_groups > _N_STREAMS:
            raise StrategyError(
                f"rank {rank} needs {n_groups} process groups or more to exchange what the "
                f"strategy cuts, and NCCL has streams for {_N_STREAMS}: let fewer devices exchange "
                "with each other, by cutting operators over fewer of them or by samples alone"
            )
        self._made.append(dist.new_group(list(devices), timeout=self._timeout))
        return self._made[-1]

    def _probe(self, n_elements: int = 1) -> Tensor:
        return torch.zeros(n_elements, device=self._world.wire)


def scatter_sum(part: Tensor, whole: Tensor, group: Any, *, is_async: bool = False) -> Any:
    """Sum a tensor over the ranks of a group, of which each receives one of equal parts."""
    # Newer torch warns about the old name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, whole, group=group, async_op=is_async)

"""Process groups of one engine: all ranks make the same ones, and let go of them together."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.errors import StrategyError
from harness.runtime.ranks.world import World

# Streams in PyTorch's pool (kStreamsPerPool of c10/cuda/CUDAStream.cpp), which are dealt in turn.
_N_STREAMS = 32


class Groups:
    """Makes process groups; all ranks must make the same ones in the same order.

    NCCL connects the ranks of a group when they first use it, and holds up the host until all of
    them do: a receive posted ahead would wait for a rank that itself waits for this one. So its
    groups are used once as they are made. Each has a stream, in which what comes later waits for
    what came before; two that shared one could wait for each other.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._world, self._timeout = world, timedelta(seconds=timeout_s)
        self._is_nccl = world.backend == "nccl"
        self._made: list[Any] = []
        self._n_of: Counter[int] = Counter()  # by rank

    def for_sums(self, devices: tuple[int, ...]) -> Any:
        """A group of devices that add up.

        Raises:
            StrategyError: under NCCL, one of them has too many groups.
        """
        group = self._make(devices)
        if self._is_nccl and self._world.rank in devices:
            dist.all_reduce(self._probe(), group=group)
        return group

    def for_gradients(self, devices: tuple[int, ...]) -> Any:
        """A group of devices that hold the same weights; torch's own where they are all.

        Raises:
            StrategyError: under NCCL, one of them has too many groups.
        """
        # NCCL's group of all was made before, and may have the stream of one that is made now.
        if len(devices) == self._world.size and not self._is_nccl:
            return dist.group.WORLD
        return self.for_sums(devices)

    def for_transfers(self, sender: int, reader: int) -> Any:
        """A group by which one rank sends to another.

        Raises:
            StrategyError: under NCCL, one of them has too many groups.
        """
        group = self._make((sender, reader))
        if self._is_nccl and self._world.rank == sender:
            dist.send(self._probe(), reader, group=group)
        elif self._is_nccl and self._world.rank == reader:
            dist.recv(self._probe(), sender, group=group)
        return group

    def close(self) -> None:
        """Destroy them; every rank must be done with what they carried."""
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

    def _probe(self) -> torch.Tensor:
        return torch.zeros(1, device=self._world.wire)

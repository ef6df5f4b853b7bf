"""The world as one rank sees it: who it is, which device it drives, how it reaches the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's place; the torch process group `torch.distributed.group.WORLD` is up while a
    workload runs.

    Attributes:
        backend: nccl or gloo, the same on every rank.
        backend_reason: why that one, for the log.
        interface: NIC that reaches the other ranks (`lo` when all share a host).
        nic_bytes_per_s: what it carries each way; 0 when unknown or loopback.
        n_cores: cores this rank may use (affinity and cgroup quota; may be fractional).
        n_threads: threads torch was given.
        n_sharing: ranks that drive this one's GPU; 1 on a CPU.
        hostnames: of every rank, by rank.
        mpi: mpi4py's COMM_WORLD in a workload that runs in the rank's first process, else None.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hostname: str
    hostnames: list[str]
    device: torch.device
    device_kind: str
    backend: str
    backend_reason: str
    interface: str
    nic_bytes_per_s: float = 0.0
    n_cores: float
    n_threads: int
    memory_bytes: int
    n_sharing: int = 1
    mpi: Any = None

    @property
    def wire(self) -> torch.device:
        """Whose memory the process group moves: NCCL the GPU's, gloo the host's.

        Between two ranks gloo takes nothing else, where this one has a GPU as well.
        """
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this rank logs, reports and writes the header."""
        return self.rank == 0

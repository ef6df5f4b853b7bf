"""One rank's view of the launch: its number, device, backend and network interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's view of the launch; while a workload runs, `torch.distributed.group.WORLD` exists.

    Attributes:
        backend: nccl or gloo, the same on every rank.
        backend_reason: the reason for the choice, for the log.
        interface: NIC that reaches the other ranks (`lo` if all share a host).
        nic_bytes_per_s: bandwidth of the NIC each way; 0 if unknown or loopback.
        n_cores: cores this rank may use (affinity and cgroup quota; may be fractional).
        n_threads: number of torch's threads.
        n_sharing: ranks on this rank's GPU, itself included; 1 on a CPU.
        hostnames: every rank's host, by rank.
        mpi: mpi4py's COMM_WORLD if the workload runs in the rank's first process, else None.
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
        """Device of the process group's tensors: the GPU for NCCL, the CPU for gloo, whose
        point-to-point operations support nothing else."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this rank logs, reports and writes the header."""
        return self.rank == 0

"""MPI as a transport, by mpi4py's buffer calls, which neither pickle nor copy."""

from __future__ import annotations

from typing import Any

import torch

from harness.measure.clock import Clock, HostClock


class MpiTransport:
    """COMM_WORLD on host memory.

    The MPI from PyPI has no CUDA support, so times exclude copies from and to a GPU.
    """

    name = "mpi"

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.device = torch.device("cpu")
        self.clock: Clock = HostClock()
        from mpi4py import MPI  # its import initialises MPI, which the owner of `comm` has done

        self._in_place = MPI.IN_PLACE

    def barrier(self) -> None:
        self._comm.Barrier()

    def send(self, data: torch.Tensor, target: int) -> None:
        self._comm.Send(data.numpy(), target)

    def receive(self, data: torch.Tensor, source: int) -> None:
        self._comm.Recv(data.numpy(), source)

    def all_reduce(self, data: torch.Tensor) -> None:
        self._comm.Allreduce(self._in_place, data.numpy())

    def all_gather(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Allgather(data.numpy(), out.numpy())

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Reduce_scatter_block(data.numpy(), out.numpy())

    def broadcast(self, data: torch.Tensor) -> None:
        self._comm.Bcast(data.numpy(), 0)

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Alltoall(data.numpy(), out.numpy())

    def ring(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Sendrecv(
            data.numpy(),
            (self.rank + 1) % self.size,
            recvbuf=out.numpy(),
            source=(self.rank - 1) % self.size,
        )

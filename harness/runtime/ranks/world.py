"""One rank's view of the launch, and the arguments of a workload's body."""

from __future__ import annotations

import math
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from harness.domain.record import has_details, is_detail
from harness.errors import ConfigError, LaunchError
from harness.measure.recorder import Recorder
from harness.measure.store import RecordWriter
from harness.runtime.ranks.environment import leave_warnings_to_rank_0
from harness.units import format_duration


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
        is_bounded: every wait for other ranks ends by the process group's timeout, because no agent
            watches over them.
    """

    rank: int
    size: int
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
    is_bounded: bool = False

    @classmethod
    def of_program(cls, device: torch.device | str | None = None) -> Self:
        """The view of a program that has joined a process group of its own.

        Args:
            device: the current GPU under NCCL, else the CPU.

        Raises:
            LaunchError: it has joined none.
            ConfigError: there is no such device.
        """
        if not dist.is_initialized():
            raise LaunchError(
                "this program has no process group: call torch.distributed.init_process_group "
                "first, and start it by torchrun"
            )
        has_nccl = "cuda:nccl" in dist.get_backend_config() and torch.cuda.is_available()
        found = _device(device or ("cuda" if has_nccl else "cpu"))
        if found.type == "cuda":  # under gloo too, for events and streams
            torch.cuda.set_device(torch.cuda.current_device() if found.index is None else found)
            found = torch.device("cuda", torch.cuda.current_device())
        backend = "nccl" if has_nccl and found.type == "cuda" else "gloo"
        host, size = platform.node(), dist.get_world_size()
        hosts = [host] * size
        dist.all_gather_object(hosts, host)
        leave_warnings_to_rank_0(dist.get_rank())
        return cls(
            rank=dist.get_rank(), size=size, hostname=host, hostnames=hosts, device=found,
            device_kind=found.type, backend=backend, backend_reason="the program's",
            interface="", n_cores=1.0, n_threads=torch.get_num_threads(), memory_bytes=0,
            is_bounded=True,
        )  # fmt: skip

    @property
    def wire(self) -> torch.device:
        """Device of the process group's tensors: the GPU for NCCL, the CPU for gloo, whose
        point-to-point operations support nothing else."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this rank logs, reports and writes the header."""
        return self.rank == 0


def _device(given: torch.device | str) -> torch.device:
    """A GPU of this host, or its processor."""
    try:
        found = torch.device(given)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    n_gpus = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type != "cpu" and (found.index or 0) >= n_gpus:
        raise ConfigError(f"device is {given}, and this host has {n_gpus} GPUs: give cpu or cuda:N")
    return found


class Progress:
    """Shows `label: done/total`, and the time left by the mean rate so far: redraws a line on a
    terminal at most five times a second; prints a line every ten seconds elsewhere, such as under
    mpirun; stops when nobody reads it any more."""

    def __init__(self, *, is_shown: bool) -> None:
        self._stream = sys.stderr
        self._is_shown = is_shown and self._stream is not None
        self._is_terminal = self._is_shown and self._stream.isatty()
        self._next_s = 0.0 if self._is_terminal else time.monotonic() + 10.0
        self._first = ("", 0, 0.0)  # label, done, time

    def update(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show progress if the next update is due; cheap otherwise."""
        now_s = time.monotonic()
        if self._first[0] != label:
            self._first = label, done, now_s
        is_last = self._is_terminal and done >= total
        if not self._is_shown or (now_s < self._next_s and not is_last):
            return
        self._next_s = now_s + (0.2 if self._is_terminal else 10.0)
        _, first, first_s = self._first
        text = f"{label}: {done}/{total} {note}".rstrip()
        if first < done < total and now_s - first_s >= 5.0:
            left_s = (now_s - first_s) / (done - first) * (total - done)
            text += f", about {format_duration(math.ceil(left_s))} left"
        try:
            if self._is_terminal:
                end = "\n" if is_last else ""
                self._stream.write(f"\r\033[K{text}{end}")
            else:
                self._stream.write(f"{text}\n")
            self._stream.flush()
        except OSError:  # its terminal or pipe has gone, or its disk is full
            self._is_shown = False


@dataclass(frozen=True, kw_only=True)
class Context:
    """One run on one rank.

    Attributes:
        recorder: collects spans and samples by the device's clock (CUDA events or host).
        writer: appends to this rank's file; call `flush` between steps, never inside a span.
        progress: shows progress on rank 0's terminal; silent on other ranks.
        run_dir: directory of the run's files.
        collective_timeout_s: longest wait for other ranks before the run fails.
    """

    world: World
    recorder: Recorder
    writer: RecordWriter
    progress: Progress
    run_dir: Path
    collective_timeout_s: float = 300.0

    def flush(self) -> None:
        """Write the records that are complete, without waiting for the device, but for details of
        steps that have none."""
        records = self.recorder.collect_ready()
        self.writer.write(r for r in records if not is_detail(r) or has_details(r.step or 0))

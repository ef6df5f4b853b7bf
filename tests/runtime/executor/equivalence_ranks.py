"""Jobs on ranks, forked by a server that has imported modules and captured models.

A rank that fails or hangs costs its own job only.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import nccl_rules
import torch
import torch.distributed as dist
from made_runs import world_of

from harness.runtime.ranks.world import World

COLLECTIVE_TIMEOUT_S = 200.0
# A case takes a second, but machines are shared.
JOB_TIMEOUT_S = 240.0
# After one rank has failed, the others wait for it in vain.
_GRACE_S = 2.0
_HUNG = "-no answer"
_N_LINES = 14

Job = Callable[[Any, World], Any]


class RanksFailedError(Exception):
    """A job failed or hung on some rank; says which rank and where it stood."""


def local_world(rank: int, size: int, device: str = "cpu") -> World:
    """A world of one core for each rank, two ranks a node; ranks share a GPU, and one alone uses
    NCCL."""
    world = world_of(rank, size, hosts=[f"node{rank // 2}" for rank in range(size)])
    if device == "cpu":
        return world
    if device == nccl_rules.NAME:
        return replace(world, backend="nccl")
    return replace(
        world, device=torch.device(device), backend="nccl" if size == 1 else "gloo", n_sharing=size
    )


def _told(answers: list[bytes]) -> str:
    """What went wrong: what ranks raised, then where others were waiting."""
    wrong = [(r, a[1:].decode().strip()) for r, a in enumerate(answers) if a[:1] != b"+"]
    wrong.sort(key=lambda one: one[1].startswith(_HUNG[1:]))
    return "\n".join(f"rank {r}: " + "\n".join(t.splitlines()[-_N_LINES:]) for r, t in wrong)


def _carry_out(job: bytes, rank: int, size: int, directory: str) -> bytes:
    function, argument, device = pickle.loads(job)  # noqa: S301 - from the parent
    world = local_world(rank, size, device)
    store = dist.FileStore(f"{directory}/store", size)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    backend = world.backend
    if device == nccl_rules.NAME:
        nccl_rules.register()
        backend = nccl_rules.NAME
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if world.backend == "nccl":
        dist.barrier()  # as `join_process_group` does
    result = function(argument, world)
    dist.barrier()
    nccl_rules.close()
    dist.destroy_process_group()
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _run_rank(job: bytes, rank: int, size: int, directory: str, connection: Connection) -> None:
    with open(f"{directory}/stack{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        try:
            answer = b"+" + _carry_out(job, rank, size, directory)
        except Exception:
            answer = b"-" + traceback.format_exc().encode()
        connection.send_bytes(answer)


class _Job:
    """Ranks of one job."""

    def __init__(self, job: bytes, size: int, directory: str) -> None:
        self._directory = directory
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("fork")
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (job, rank, size, directory, theirs)
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def answers(self, timeout_s: float) -> list[bytes]:
        """Each rank's answer: + and its result, - and its traceback, or where it hangs."""
        answers: dict[int, bytes] = {}
        deadline = time.monotonic() + timeout_s
        size = len(self._connections)
        while len(answers) < size and (left := deadline - time.monotonic()) > 0:
            open_ones = [c for i, c in enumerate(self._connections) if i not in answers]
            for connection in wait(open_ones, left):
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._connections[rank].recv_bytes()
                except EOFError:
                    answers[rank] = b"-the process died"
                if answers[rank][:1] == b"-":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return [answers.get(i) or self._stack_of(i, timeout_s) for i in range(size)]

    def _stack_of(self, rank: int, timeout_s: float) -> bytes:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        stack = Path(self._directory, f"stack{rank}").read_text()
        shown = "\n".join(stack.splitlines()[:_N_LINES])
        return f"{_HUNG}, within {timeout_s:g} s or after another rank failed: {shown}".encode()

    def close(self) -> None:
        """End the ranks that still run."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()


def _serve(connection: Connection, device: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    # Preparing runs a backward, after which, where torch has a GPU, autograd works in no fork.
    if not device.startswith("cuda"):
        import equivalence_preload

    # Else each rank collects among all that it was forked with, which takes a quarter of its time.
    gc.freeze()
    gc.set_threshold(20_000)
    with suppress(EOFError, ConnectionError):  # the parent ended
        while True:
            job, size, timeout_s = connection.recv()
            if not device.startswith("cuda"):
                equivalence_preload.prepare(pickle.loads(job)[1])  # noqa: S301 - from the parent
            with tempfile.TemporaryDirectory() as directory:
                ranks = _Job(job, size, directory)
                connection.send(ranks.answers(timeout_s))
                ranks.close()


def _start_server(connection: Connection, device: str) -> BaseProcess:
    here = str(Path(__file__).parent)
    if device.startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("FIRST_GPU", "0")
        # Asking the driver whether a GPU is available would keep forks from using it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # A fresh interpreter, which knows no sys.path but this.
    known = os.environ.get("PYTHONPATH", "")
    if here not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (here, known) if part)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(connection, device))
    server.start()
    return server


class Ranks:
    """Runs jobs on any number of processes of this machine.

    Args:
        device: of every rank: cpu, or cuda:0, which the server must not use before it forks.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._server: BaseProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._connection is not None:
            self._connection.close()
            self._server.join()

    def _connected(self) -> Connection:
        """The connection with the server, which is started when first needed."""
        if self._connection is None:
            self._connection, servers_end = multiprocessing.Pipe()
            self._server = _start_server(servers_end, self.device)
            servers_end.close()
        return self._connection

    def under_nccl_rules(self) -> Self:
        """Ranks of the same server under NCCL's rules; see nccl_rules.py."""
        self._connected()
        found = copy(self)
        found.device = nccl_rules.NAME
        return found

    def run(
        self, size: int, function: Job, argument: Any, *, timeout_s: float = JOB_TIMEOUT_S
    ) -> list[Any]:
        """What `function(argument, world)` returns on each rank; it must be importable.

        Raises:
            RanksFailedError: on some rank it raised or took too long.
        """
        connection = self._connected()
        job = pickle.dumps((function, argument, self.device))
        connection.send((job, size, timeout_s))
        answers = connection.recv()
        if all(answer[:1] == b"+" for answer in answers):
            return [
                torch.load(io.BytesIO(a[1:]), map_location="cpu", weights_only=False)
                for a in answers
            ]
        raise RanksFailedError(_told(answers))

"""Ranks that are started once and carry out many jobs; one that fails or hangs costs only them."""

from __future__ import annotations

import faulthandler
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.runtime.ranks.world import World

COLLECTIVE_TIMEOUT_S = 200.0
# A case takes a second, but machines are shared.
JOB_TIMEOUT_S = 240.0
# After one rank has failed, the others wait for it in vain.
_GRACE_S = 2.0
_HUNG = "-no answer"
_READY = b"ready"
_N_LINES = 14
_START_TIMEOUT_S = 300.0

Job = Callable[[Any, World], Any]


class RanksFailedError(Exception):
    """A job failed or hung on some rank; says which rank and where it stood."""


def local_world(rank: int, size: int) -> World:
    """A world of one core for each rank."""
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        hostname="localhost",
        hostnames=["localhost"] * size,
        device=torch.device("cpu"),
        device_kind="test device",
        backend="gloo",
        backend_reason="a test",
        interface="lo",
        n_cores=1,
        n_threads=1,
        memory_bytes=4 << 30,
    )


def _told(answers: list[bytes]) -> str:
    """What went wrong: what ranks raised, then where others were waiting."""
    wrong = [(r, a[1:].decode().strip()) for r, a in enumerate(answers) if a[:1] != b"+"]
    wrong.sort(key=lambda one: one[1].startswith(_HUNG[1:]))
    return "\n".join(f"rank {r}: " + "\n".join(t.splitlines()[-_N_LINES:]) for r, t in wrong)


def _carry_out(job: bytes, rank: int, size: int, store: Any) -> bytes:
    function, argument = pickle.loads(job)  # noqa: S301 - from the parent
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    result = function(argument, local_world(rank, size))
    dist.barrier()
    dist.destroy_process_group()
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _serve(rank: int, size: int, directory: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    logging.getLogger("harness").setLevel(logging.ERROR)  # operators that are gathered, by name
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(f"{directory}/stack{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        store = dist.FileStore(f"{directory}/store", size)
        connection.send_bytes(_READY)
        for number in itertools.count():
            with suppress(EOFError, ConnectionError):  # the parent ended or replaced this rank
                job = connection.recv_bytes()
                own = dist.PrefixStore(str(number), store)
                try:
                    answer = b"+" + _carry_out(job, rank, size, own)
                except Exception:
                    answer = b"-" + traceback.format_exc().encode()
                connection.send_bytes(answer)
                continue
            return


def _server_with_all_imported() -> Any:
    """Forks of a server that has imported what ranks need: seconds less for each."""
    here = str(Path(__file__).parent)
    # The server starts as a fresh interpreter, which knows no sys.path but this.
    known = os.environ.get("PYTHONPATH", "")
    if here not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (here, known) if part)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["equivalence_preload"])
    return context


class Ranks:
    """`size` processes of this machine over gloo; every job has a process group of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._directory.cleanup()

    def run(self, function: Job, argument: Any, *, timeout_s: float = JOB_TIMEOUT_S) -> list[Any]:
        """What `function(argument, world)` returns on each rank; it must be importable.

        Raises:
            RanksFailedError: on some rank it raised or took too long; the ranks are replaced.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, argument))
        for connection in self._connections:
            connection.send_bytes(job)
        answers = self._collect(timeout_s)
        if all(answer[:1] == b"+" for answer in answers):
            return [torch.load(io.BytesIO(a[1:]), weights_only=False) for a in answers]
        self._stop()
        raise RanksFailedError(_told(answers))

    def _start(self) -> None:
        place = Path(self._directory.name)
        for left in place.iterdir():
            left.unlink()
        context = _server_with_all_imported()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self._directory.name, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for rank, connection in enumerate(self._connections):
            if not connection.poll(_START_TIMEOUT_S) or connection.recv_bytes() != _READY:
                raise RanksFailedError(f"rank {rank} did not start in {_START_TIMEOUT_S:g} s")

    def _collect(self, timeout_s: float) -> list[bytes]:
        """Each rank's answer: + and its result, - and its traceback, or where it hangs."""
        answers: dict[int, bytes] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            open_ones = [c for i, c in enumerate(self._connections) if i not in answers]
            for connection in wait(open_ones, left):
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._connections[rank].recv_bytes()
                except EOFError:
                    answers[rank] = b"-the process died"
                if answers[rank][:1] == b"-":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return [answers.get(i) or self._stack_of(i, timeout_s) for i in range(self.size)]

    def _stack_of(self, rank: int, timeout_s: float) -> bytes:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        stack = Path(self._directory.name, f"stack{rank}").read_text()
        shown = "\n".join(stack.splitlines()[:_N_LINES])
        return f"{_HUNG}, within {timeout_s:g} s or after another rank failed: {shown}".encode()

    def _stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

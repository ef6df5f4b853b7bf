"""Exchange JSON values between ranks over a TCP store, outside the measured work.

A waiting rank sleeps in the kernel, because an MPI barrier would spin on cores that are being
measured. Values are JSON, so nothing received is unpickled.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import Store

from harness.errors import PeerError, ResultsError, first_line
from harness.measure.store import write_atomically

T = TypeVar("T")
P = ParamSpec("P")

_POLL = timedelta(seconds=20)
# A launcher that ends all ranks may have reached rank 0 first; then there is nothing to say.
_TIME_TO_END_S = 0.5
_CHUNK_BYTES = 1 << 20


def _explain_lost_store(
    method: Callable[Concatenate[Control, P], T],
) -> Callable[Concatenate[Control, P], T]:
    """Turn a lost connection into a PeerError, because the store runs on rank 0."""

    @functools.wraps(method)
    def call(self: Control, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except dist.DistNetworkError as error:
            time.sleep(_TIME_TO_END_S)
            raise PeerError(
                f"rank {self.rank} lost rank 0, which has ended or cannot be reached "
                f"({first_line(error)}): see rank 0's last output",
                (0,),
            ) from None

    return call


class Control:
    """A rank's connection to the store on rank 0; all ranks make the same calls in order."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self._n_calls = 0

    def _key(self, name: str) -> str:
        self._n_calls += 1
        return f"control/{self._n_calls}/{name}"

    def _wait(self, key: str) -> bytes:
        while True:
            try:
                self.store.wait([key], _POLL)
            except dist.DistStoreError:
                continue
            return bytes(self.store.get(key))

    @_explain_lost_store
    def gather(self, name: str, value: T, type_: Any = Any) -> list[T]:
        """Every rank's value, by rank; blocks without a timeout until all have called it."""
        key = self._key(name)
        self.store.set(f"{key}/{self.rank}", msgspec.json.encode(value).decode())
        return [
            msgspec.json.decode(self._wait(f"{key}/{rank}"), type=type_)
            for rank in range(self.size)
        ]

    @_explain_lost_store
    def broadcast(self, name: str, value: T, type_: Any = Any) -> T:
        """Rank 0's value on every rank; ignores the argument on other ranks."""
        key = self._key(name)
        if self.rank == 0:
            self.store.set(key, msgspec.json.encode(value).decode())
        decoded: T = msgspec.json.decode(self._wait(key), type=type_)
        return decoded

    @_explain_lost_store
    def send_to_first(self, data: bytes | None) -> dict[int, bytes]:
        """Send bytes to rank 0, which returns them by rank; None sends nothing."""
        key = self._key("data")
        n_chunks = 0 if data is None else -(-len(data) // _CHUNK_BYTES)
        for i in range(n_chunks):
            assert data is not None
            # The store takes bytes; its type stub says str.
            chunk: Any = data[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES]
            self.store.set(f"{key}/{self.rank}/{i}", chunk)
        counts = self.gather("data", n_chunks, int)
        received: dict[int, bytes] = {}
        if self.rank == 0:
            for rank, n in enumerate(counts):
                keys = [f"{key}/{rank}/{i}" for i in range(n)]
                if n:
                    received[rank] = b"".join(bytes(self.store.get(k)) for k in keys)
                for k in keys:
                    self.store.delete_key(k)
        return received

    @_explain_lost_store
    def leave(self) -> None:
        """End the exchange; rank 0, which serves the store, waits until all ranks have left."""
        self.store.set(f"left/{self.rank}", "1")
        if self.rank == 0:
            for rank in range(self.size):
                self._wait(f"left/{rank}")

    @_explain_lost_store
    def report_failure(self, run: str, reason: str) -> None:
        """Report to all ranks that this rank has failed in a run; the first report is kept."""
        self.store.compare_set(f"failure/{run}", "", f"{self.rank} {reason}")

    @_explain_lost_store
    def read_failure(self, run: str) -> str | None:
        """`<rank> <reason>` of the first failure of a run, or None."""
        key = f"failure/{run}"
        return self.store.get(key).decode() if self.store.check([key]) else None


def copy_to_first(control: Control, paths: Mapping[int, Path]) -> dict[int, str]:
    """Copy one file of each of some ranks to the same path on rank 0; all ranks must call it.

    Returns:
        Why a rank's file could not be written on rank 0, by rank; files that ranks lack are no
        problem.
    """
    path = paths.get(control.rank)
    size = path.stat().st_size if path is not None and path.exists() else -1
    sizes = control.gather("sizes", size, int)
    missing = [
        rank for rank, own in paths.items() if sizes[rank] >= 0 and not _has_size(own, sizes[rank])
    ]
    missing = control.broadcast("missing", missing, list[int])
    if not missing:
        return {}
    data = path.read_bytes() if path is not None and control.rank in missing else None
    problems: dict[int, str] = {}
    for rank, content in control.send_to_first(data).items():
        try:
            write_atomically(paths[rank], content)
        except ResultsError as error:
            problems[rank] = str(error)
    return problems


def _has_size(path: Path, n_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == n_bytes

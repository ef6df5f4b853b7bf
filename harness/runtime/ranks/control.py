"""Exchange JSON values between ranks over a TCP store, outside the measured work.

A waiting rank sleeps in the kernel, because an MPI barrier would spin on cores that are being
measured. Values are JSON, so nothing received is unpickled.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import Store

from harness.errors import PeerError, first_line

T = TypeVar("T")
P = ParamSpec("P")

_POLL = timedelta(seconds=20)
# A launcher that ends all ranks may have reached rank 0 first; then there is nothing to say.
_TIME_TO_END_S = 2.0
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
    def send(self, data: bytes, source: int, targets: Sequence[int]) -> bytes:
        """Send a rank's bytes to others, which return them; all ranks must call it."""
        key = self._key("data")
        chunks: list[Any] = []  # of bytes; the stub of the store's type says str
        if self.rank == source:
            chunks = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        for at, chunk in enumerate(chunks):
            self.store.set(f"{key}/{at}", chunk)
        n_chunks = self.gather("sent", len(chunks), int)[source]
        received = b""
        if self.rank in targets:
            received = b"".join(bytes(self.store.get(f"{key}/{at}")) for at in range(n_chunks))
        self.gather("received", 0, int)
        for at in range(len(chunks)):
            self.store.delete_key(f"{key}/{at}")
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

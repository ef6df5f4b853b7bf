"""Exchange JSON values between ranks over a TCP store, outside the measured work.

A waiting rank sleeps in the kernel, because an MPI barrier would spin on cores that are being
measured. Values are JSON, so nothing received is unpickled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import Store

from harness.errors import LaunchError, PeerError, first_line

T = TypeVar("T")

# A signal is handled between two polls.
_POLL = timedelta(seconds=1)
# A launcher that ends all ranks may have reached rank 0 first; then there is nothing to say.
_TIME_TO_END_S = 2.0
_CHUNK_BYTES = 1 << 20


class Control:
    """A rank's connection to the store on rank 0; all ranks make the same calls in order."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self._n_calls = 0

    @contextmanager
    def _lost_store_explained(self) -> Iterator[None]:
        """Turn a lost connection into a PeerError, because the store runs on rank 0."""
        try:
            yield
        except dist.DistNetworkError as error:
            time.sleep(_TIME_TO_END_S)
            raise PeerError(
                f"rank {self.rank} lost rank 0, which has ended or cannot be reached "
                f"({first_line(error)}): see rank 0's last output",
                (0,),
            ) from None

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

    def await_all(self, limit_s: float) -> None:
        """Wait until every rank has called it.

        Raises:
            LaunchError: names the ranks that have not within the limit.
        """
        keys = [f"here/{rank}" for rank in range(self.size)]
        end_s = time.monotonic() + limit_s
        with self._lost_store_explained():
            self.store.set(keys[self.rank], "1")
            while True:
                with suppress(dist.DistStoreError):
                    self.store.wait(keys, _POLL)
                    return
                if time.monotonic() > end_s:
                    break
            missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        raise LaunchError(
            f"of {self.size} ranks these have not come within {limit_s:g} s: {', '.join(missing)}; "
            "look at their output, and start all ranks again"
        )

    def gather(self, name: str, value: T, type_: Any = Any) -> list[T]:
        """Every rank's value, by rank; blocks without a timeout until all have called it."""
        key = self._key(name)
        with self._lost_store_explained():
            self.store.set(f"{key}/{self.rank}", msgspec.json.encode(value).decode())
            found = [self._wait(f"{key}/{rank}") for rank in range(self.size)]
        return [msgspec.json.decode(data, type=type_) for data in found]

    def broadcast(self, name: str, value: T, type_: Any = Any) -> T:
        """Rank 0's value on every rank; ignores the argument on other ranks."""
        key = self._key(name)
        with self._lost_store_explained():
            if self.rank == 0:
                self.store.set(key, msgspec.json.encode(value).decode())
            decoded: T = msgspec.json.decode(self._wait(key), type=type_)
            return decoded

    def send(self, data: bytes, source: int, targets: Sequence[int]) -> bytes:
        """Send a rank's bytes to others, which return them; all ranks must call it."""
        key = self._key("data")
        chunks: list[Any] = []  # of bytes; the stub of the store's type says str
        if self.rank == source:
            chunks = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        with self._lost_store_explained():
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

    def leave(self) -> None:
        """End the exchange, after rank 0; it serves the store until all ranks have left."""
        with self._lost_store_explained():
            if self.rank != 0:  # in MPI's own end they would spin while rank 0 makes the report
                self._wait("left/0")
            self.store.set(f"left/{self.rank}", "1")
            if self.rank == 0:
                for rank in range(self.size):
                    self._wait(f"left/{rank}")

    def report_failure(self, run: str, reason: str) -> None:
        """Report to all ranks that this rank has failed in a run; the first report is kept."""
        with self._lost_store_explained():
            self.store.compare_set(f"failure/{run}", "", f"{self.rank} {reason}")

    def read_failure(self, run: str) -> str | None:
        """`<rank> <reason>` of the first failure of a run, or None."""
        key = f"failure/{run}"
        with self._lost_store_explained():
            return self.store.get(key).decode() if self.store.check([key]) else None

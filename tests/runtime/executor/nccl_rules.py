"""A process group on CPUs that keeps NCCL's rules: the executor's NCCL path without GPUs.

- A group has one CUDA stream: its work starts in the order of posting, after the work before it.
- A message has no tag: the n-th send of a pair of ranks meets the n-th receive.
- A send ends when it is received. Only sends and receives of one batch start together.
- The first collective or batch of a group blocks the host until all its ranks use it, and so does
  the first collective of each algorithm, which depends on operation and size. The first message of
  two ranks blocks until both use it, and so does the first batch that has messages of these two.
- NCCL has no integers of 16 bits, and collectives ask for contiguous tensors.

A wait blocks the host here, and the compute stream under NCCL. In both, work that is posted after
the wait starts after the work that was waited for. gloo carries the
bytes. A receive of another shape or dtype than the send fails.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "nccl_rules"
_KNOWN = {  # ncclDataType in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_FACTS, _DATA, _READ, _N_TAGS = range(4)  # gloo's tags of the n-th message follow n * _N_TAGS
_MEETING = 2**30
_BATCHING = _MEETING + 1
_CONNECTING = _MEETING + 2  # and further tags for each algorithm
_OPERATIONS = ("messages", "sum", "copy", "scatter", "reduce", "barrier")
_SMALL = 64  # bytes for which a collective has another algorithm
_N_DIMS = 8

_made: list[RulesGroup] = []

Start = Callable[[], Callable[[], None]]


class RulesWork(dist.Work):
    """Work that a group carries out; waiting for it raises its error."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        return self.future.done()

    def get_future(self) -> Any:
        return self.future


class RulesGroup(dist.ProcessGroup):
    """A group whose work starts in the order of posting."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._connected: set[int] = set()
        self._met: dict[int, set[int]] = {_MEETING: set(), _BATCHING: set()}
        self._n_sent: Counter[int] = Counter()
        self._n_received: Counter[int] = Counter()
        self._posted: SimpleQueue[tuple[list[Start], RulesWork] | None] = SimpleQueue()
        self._works: list[RulesWork] = []  # torch.distributed's references do not keep them
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        _made.append(self)

    def _run(self) -> None:
        while (posted := self._posted.get()) is not None:
            starts, work = posted
            try:
                with ThreadPoolExecutor(len(starts)) as threads:
                    for ended in [threads.submit(start()) for start in starts]:
                        ended.result()
                work.future.set_result(None)
            except Exception as error:
                work.future.set_exception(error)

    def post(self, *starts: Start) -> Any:
        """Post work that starts together, after all work that was posted before."""
        work = RulesWork()
        self._posted.put((list(starts), work))
        self._works.append(work)
        return work

    def sending(self, tensor: Tensor, target: int) -> Start:
        at = _first_tag(tensor, self._n_sent, target)

        def start() -> Callable[[], None]:
            works = [
                self._gloo.send([_facts(tensor)], target, at + _FACTS),
                self._gloo.send([tensor.view(-1)], target, at + _DATA),
                self._gloo.recv([torch.zeros(1)], target, at + _READ),
            ]
            return lambda: _wait(*works)

        return start

    def receiving(self, tensor: Tensor, source: int) -> Start:
        at = _first_tag(tensor, self._n_received, source)

        def start() -> Callable[[], None]:
            wanted, found = _facts(tensor), _facts(tensor)
            work = self._gloo.recv([found], source, at + _FACTS)

            def finish() -> None:
                _wait(work)
                if not found.equal(wanted):
                    raise RuntimeError(f"sent: {found.tolist()}, received: {wanted.tolist()}")
                _wait(self._gloo.recv([tensor.view(-1)], source, at + _DATA))
                _wait(self._gloo.send([torch.zeros(1)], source, at + _READ))

            return finish

        return start

    # The interface of torch.distributed.

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def connect(self, operation: str, n_bytes: int = 0) -> None:
        """Wait for all ranks, at the first call for an algorithm."""
        algorithm = 2 * _OPERATIONS.index(operation) + (n_bytes > _SMALL)
        if algorithm not in self._connected:
            self._connected.add(algorithm)
            self._await(set(range(self.size())) - {self.rank()}, _CONNECTING + algorithm)

    def batch(self, peers: set[int]) -> None:
        """Wait for the peers at the first batch with messages of them, at the first use for all."""
        if not self._connected:
            self.connect("messages")
        self._meet(peers, _BATCHING)

    def _meet(self, others: set[int], tag: int = _MEETING) -> None:
        """Wait for other ranks, at the first call with them."""
        self._await(others - self._met[tag], tag)
        self._met[tag] |= others

    def _await(self, others: set[int], tag: int) -> None:
        ways = self._gloo.send, self._gloo.recv
        _wait(*[way([torch.zeros(1)], other, tag) for way in ways for other in others])

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:  # type: ignore[override]
        self._meet({target})
        return self.post(self.sending(tensors[0], target))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:  # type: ignore[override]
        self._meet({source})
        return self.post(self.receiving(tensors[0], source))

    def _collective(
        self, operation: str, tensors: Sequence[Tensor], call: Callable[[], Any]
    ) -> Any:
        for tensor in tensors:
            _check(tensor)
            assert tensor.is_contiguous(), "Tensors must be contiguous"
        self.connect(operation, max((tensor.nbytes for tensor in tensors), default=0))

        def start() -> Callable[[], None]:
            work = call()
            return lambda: _wait(work)

        return self.post(start)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._collective("sum", tensors, lambda: self._gloo.allreduce(tensors, opts))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._collective("reduce", tensors, lambda: self._gloo.reduce(tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._collective("copy", tensors, lambda: self._gloo.broadcast(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._collective(
            "copy", [*outputs[0], *inputs], lambda: self._gloo.allgather(outputs, inputs)
        )

    def barrier(self, opts: Any = None) -> Any:  # type: ignore[override]
        return self._collective("barrier", [], self._gloo.barrier)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]
        (output,), (parts,) = outputs, inputs
        assert output.shape == parts[self.rank()].shape
        return self._scatter(output, parts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        return self._scatter(output, list(whole.chunk(self.size())))

    _reduce_scatter_base = reduce_scatter_single  # its name before torch 2.13

    def _scatter(self, output: Tensor, parts: list[Tensor]) -> Any:
        def call() -> Any:
            flat = torch.cat([part.reshape(-1) for part in parts])
            _wait(self._gloo.allreduce([flat]))
            sizes = [part.numel() for part in parts]
            output.view(-1).copy_(flat.split(sizes)[self.rank()])

        operation = "scatter" if len({part.shape for part in parts}) == 1 else "reduce"
        return self._collective(operation, [output, *parts], call)

    def close(self) -> None:
        """End its thread, after all work."""
        self._posted.put(None)
        self._thread.join()


def _wait(*works: Any) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _check(tensor: Tensor) -> None:
    if tensor.dtype not in _KNOWN:
        raise TypeError(f"Unconvertible NCCL type {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError("a message needs a contiguous tensor")


def _first_tag(tensor: Tensor, n_messages: Counter[int], other: int) -> int:
    """Count a message with another rank; returns the first of its tags."""
    _check(tensor)
    n_messages[other] += 1
    return n_messages[other] * _N_TAGS


def _facts(tensor: Tensor) -> Tensor:
    """Dtype and shape, as integers of a fixed number."""
    shape = list(tensor.shape) + [-1] * (_N_DIMS - tensor.dim())
    return torch.tensor([sorted(map(str, _KNOWN)).index(str(tensor.dtype)), *shape])


def _batch(operations: list[dist.P2POp]) -> list[Any]:
    """batch_isend_irecv: sends and receives that start together."""
    group = operations[0].group
    ways = {dist.isend: group.sending, dist.irecv: group.receiving}
    starts = [ways[one.op](_real(one.tensor), one.group_peer) for one in operations]
    group.batch({one.group_peer for one in operations})
    return [group.post(*starts)]


def _real(tensor: Tensor) -> Tensor:
    """As torch.distributed's functions do."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def register() -> None:
    """Make the backend known to torch.distributed, in this process."""
    dist.Backend.register_backend(NAME, RulesGroup, devices=["cpu"])
    dist.batch_isend_irecv = _batch


def close() -> None:
    """End the threads of all groups of this process, before it ends."""
    for group in _made:
        group.close()
    _made.clear()

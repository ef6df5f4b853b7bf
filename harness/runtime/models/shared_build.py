"""Build a model once for all ranks of a host, if a copy for each would take too much memory.

    first rank of the host   builds it in a file without a name
    the others               build it on the meta device and map the file

The mappings are private: a page is in memory once until a rank writes it, and the kernel may drop
pages that nobody writes. A rank that cannot take part builds a model of its own.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.inputs import open_regular
from harness.runtime.engines.replicas import fingerprint_of
from harness.runtime.models.factory import on_registration, to_meta
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import gather_bytes, gather_numbers, wait_for_all
from harness.runtime.ranks.host import memory_limit_bytes
from harness.runtime.ranks.world import World
from harness.runtime.tracing.hooks import has_gradient_hooks

_log = logging.getLogger(__name__)

# Copies for all ranks of a host may take this share of its memory.
_SHARE = 0.25


class _Place(msgspec.Struct, frozen=True):
    """Where the file holds a tensor."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def mapped(self, descriptor: int, access: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        n = torch.Size(self.shape).numel()
        pages = mmap.mmap(descriptor, n * dtype.itemsize, access=access, offset=self.offset)
        return torch.frombuffer(pages, dtype=dtype).as_strided(self.shape, self.strides)


class _Sheet(msgspec.Struct, frozen=True):
    """What the other ranks of the host need to map the file.

    Attributes:
        path: of the file, as processes of the host see it.
        mark: random bytes at the file's start, because hosts may have one name.
        places: by name of a parameter or buffer; empty tensors have none.
        others: digest of the task's other tensors.
        random_state: torch's, after the build.
    """

    path: str
    mark: bytes
    places: dict[str, _Place]
    others: str
    random_state: bytes


class _WeightsFile:
    """The file of the first rank, which lives as long as somebody has it open."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._mark = os.urandom(16)
        self._end, self._is_full = mmap.ALLOCATIONGRANULARITY, False
        self._known: dict[int, tuple[_Place, Tensor]] = {}  # by address

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def take(self, tensor: Tensor) -> None:
        """Move a tensor's values into the file, unless its disk is full."""
        if not tensor.numel() or self._is_full:
            return
        like = torch.empty_like(tensor, device="meta")
        place = _Place(
            self._end, tuple(like.shape), like.stride(), str(like.dtype).removeprefix("torch.")
        )
        n_bytes = like.numel() * like.element_size()
        try:
            if self._descriptor is None:
                with tempfile.TemporaryFile() as file:
                    self._descriptor = os.dup(file.fileno())
                os.pwrite(self._descriptor, self._mark, 0)
            os.posix_fallocate(self._descriptor, place.offset, n_bytes)
        except OSError as error:
            self._is_full = True
            _log.warning(
                "every rank builds the whole model in memory of its own, because a temporary file "
                "cannot hold its weights (%s): set TMPDIR to a directory on a larger disk",
                error.strerror,
            )
            return
        self._end += -(-n_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        data = place.mapped(self._descriptor, mmap.ACCESS_WRITE)
        data.copy_(tensor.detach())
        tensor.data = data
        self._known[data.data_ptr()] = place, data

    def sheet(self, task: Task) -> _Sheet | None:
        """Complete the file, and map the model's tensors privately; None if the disk is full."""
        model = task.model
        places: dict[str, _Place] = {}
        for name, tensor in _tensors(model):
            _, held = self._known.get(tensor.data_ptr(), (None, None))
            if held is None or _layout(held) != _layout(tensor):
                self.take(tensor)
            if tensor.numel() and not self._is_full:
                places[name] = self._known[tensor.data_ptr()][0]
        if self._is_full or self._descriptor is None:
            return None
        for name, tensor in _tensors(model):
            if name in places:
                tensor.data = places[name].mapped(self._descriptor, mmap.ACCESS_COPY)
        self._known.clear()
        return _Sheet(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            mark=self._mark,
            places=places,
            others=_digest(task),
            random_state=torch.get_rng_state().numpy().tobytes(),
        )


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _digest(task: Task) -> str:
    """A digest of samples of the task's example, which may have been drawn after the weights, and
    of tensors that modules hold without registering them; empty if some of them have no data."""
    found = hashlib.sha256()
    for name, tensor in _other_tensors(task):
        if tensor.is_meta:
            return ""
        found.update(f"{name} {_layout(tensor)}".encode())
        found.update(fingerprint_of(tensor).cpu().numpy().tobytes())
    return found.hexdigest()


def _other_tensors(task: Task) -> Iterator[tuple[str, Tensor]]:
    for spec in (*task.inputs, *task.labels):
        if spec.rows is not None:
            yield f"{spec}", spec.rows
    for path, module in task.model.named_modules():
        for key, value in vars(module).items():
            for leaf in tree_leaves(value) if key not in _REGISTERED else ():
                if isinstance(leaf, Tensor):
                    yield f"{path}.{key}", leaf


class _CopyLimit:
    """Calls `beyond` with each new parameter after those that may be copied on every rank."""

    def __init__(self, limit_bytes: float, beyond: Callable[[nn.Parameter], None]) -> None:
        self._left, self._beyond = limit_bytes, beyond

    @property
    def is_exceeded(self) -> bool:
        return self._left < 0

    def __call__(self, parameter: nn.Parameter) -> None:
        self._left -= parameter.numel() * parameter.element_size()
        if self.is_exceeded:
            self._beyond(parameter)


def build_on_host(build: Callable[[], Task], world: World, share: float = _SHARE) -> Task:
    """Build a task whose model has equal weights on all ranks; all ranks must call it.

    Args:
        build: builds it in memory of this rank alone.
        share: of a host's memory, for copies of all its ranks.
    """
    if world.size == 1 or len(set(world.hostnames)) == world.size:
        return build()
    local = [rank for rank, name in enumerate(world.hostnames) if name == world.hostname]
    limit_bytes = share * memory_limit_bytes() / len(local) if len(local) > 1 else math.inf
    if world.rank != local[0]:
        return _build_next(build, limit_bytes, world, local[0])
    with closing(_WeightsFile()) as file:
        counter = _CopyLimit(limit_bytes, file.take)
        with on_registration(counter):
            task = build()
        sheet = file.sheet(task) if counter.is_exceeded else None
        if _exchange(sheet, world, is_exceeded=counter.is_exceeded):
            wait_for_all(world)  # because others map the file
    return task


def _build_next(build: Callable[[], Task], limit_bytes: float, world: World, first: int) -> Task:
    counter = _CopyLimit(limit_bytes, to_meta)
    task: Task | None = None
    try:
        with on_registration(counter):
            task = build()
    except Exception:  # it reads weights, which have no values on the meta device
        if not counter.is_exceeded:
            raise
    received = _exchange(None, world, is_exceeded=counter.is_exceeded)
    if counter.is_exceeded and not (task and received[first] and _map(task, received[first])):
        task = build()
    if received:
        wait_for_all(world)
    assert task is not None, "it was built, or an error was raised"
    return task


def _exchange(sheet: _Sheet | None, world: World, *, is_exceeded: bool) -> list[bytes]:
    """All ranks' sheets, encoded; none if the model is small for all hosts."""
    if not any(gather_numbers(is_exceeded, world)):
        return []
    wait_for_all(world)
    return gather_bytes(b"" if sheet is None else msgspec.msgpack.encode(sheet), world)


def _map(task: Task, encoded: bytes) -> bool:
    """Map the file's tensors into the task's model, and continue with its random state; false if it
    is not the same task."""
    sheet, own = msgspec.msgpack.decode(encoded, type=_Sheet), dict(_tensors(task.model))
    if {name for name, tensor in own.items() if tensor.numel()} != sheet.places.keys():
        return False
    if _digest(task) != sheet.others:
        return False
    if any(isinstance(t, nn.Parameter) and has_gradient_hooks(t) for t in own.values()):
        return False
    try:
        with open_regular(Path(sheet.path)) as file:
            if file.read(len(sheet.mark)) != sheet.mark:
                return False
            for name, place in sheet.places.items():
                data = place.mapped(file.fileno(), mmap.ACCESS_COPY)
                if (data.shape, data.dtype) != (own[name].shape, own[name].dtype):
                    return False
                _give(own[name], data)
    except OSError:  # a host of the same name, or a container of its own
        return False
    torch.set_rng_state(torch.frombuffer(bytearray(sheet.random_state), dtype=torch.uint8))
    return True


def _give(tensor: Tensor, data: Tensor) -> None:
    """Replace a tensor's data in place, so that all its names stay tied."""
    if not tensor.is_meta:
        tensor.data = data
        return
    new = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)

"""Units of sharded weights, and the exchange of their parts.

Between nodes a part goes to one device of each node, which sends it to the others:

    node 0    rank 0 a <---> rank 1 b       ranks 0 and 2, and 1 and 3, exchange parts first; then
                |              |            rank 0 sends a and c to rank 1, which sends b and d
    node 1    rank 2 c <---> rank 3 d
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.shard_state import Group, equal_nodes, shards_parameters
from harness.domain.strategy import Strategy
from harness.domain.weight_units import ROUNDED_KINDS, SharedWeight, Unit, plan_units
from harness.runtime.capture.capture import Captured
from harness.runtime.engines.phases import Phases
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.options import LARGEST_JOINED_BYTES
from harness.runtime.executor.sharded.owners import SharedSlice, flat
from harness.runtime.executor.sharded.replicas import Replicas
from harness.runtime.executor.state.weights import Holders
from harness.runtime.ranks.failures import blaming_peers
from harness.runtime.ranks.messages import start_messages
from harness.runtime.ranks.world import World

_log = logging.getLogger(__name__)


class UnitPlan(NamedTuple):
    """A unit with its slices, and whether autocast rounds each; equal on all ranks."""

    unit: Unit
    pieces: tuple[WeightSlice, ...]
    are_rounded: tuple[bool, ...]


def find_units(
    holders: Holders,
    strategy: Strategy,
    replicas: Replicas,
    unit_bytes: int,
    segments: Mapping[int, int],
    is_rounded: Callable[[WeightSlice], bool],
) -> list[UnitPlan]:
    """The units of the trained slices that several ranks share, in the order of their first use.

    Args:
        unit_bytes, segments: see `weight_units.plan_units`.
        is_rounded: whether autocast rounds a slice before each use (`rounds_slice`).
    """
    if strategy.shard_state == "none":
        return []
    pieces, weights = list[WeightSlice](), list[SharedWeight]()
    for piece, devices in holders.trained():
        uses = holders.uses(piece)
        for group in replicas.sharing_groups(devices):
            if len(group) > 1:
                pieces.append(piece)
                weights.append(
                    SharedWeight(
                        devices=group,
                        operators=tuple(sorted({use.position for use in uses})),
                        stages=frozenset(use.stage for use in uses),
                        n_bytes=holders.n_bytes(piece),
                        dtype=str(holders.dtype(piece)),
                        is_alike=holders.is_used_alike(piece),
                        is_rounded=is_rounded(piece),
                    )
                )
    units = plan_units(
        weights,
        unit_bytes,
        segments=segments,
        recomputes=[stage.recompute for stage in strategy.stages],
        is_freeing=shards_parameters(strategy.shard_state),
    )
    return [
        UnitPlan(
            unit,
            tuple(pieces[k] for k in unit.weights),
            tuple(weights[k].is_rounded for k in unit.weights),
        )
        for unit in units
    ]


def rounds_slice(captured: Captured, holders: Holders, piece: WeightSlice) -> bool:
    """Whether autocast rounds a slice before each use. It rounds the matrices of products, but
    neither biases, which may be added to a sum that is not rounded, nor an attention's tables of
    relative positions."""
    if len(piece.intervals) < 2 or holders.dtype(piece) != torch.float32:
        return False
    kinds = {captured.graph.operators[use.position].kind for use in holders.uses(piece)}
    owner = captured.module.get_submodule(piece.name.rpartition(".")[0])
    is_product = "attention" not in kinds or isinstance(owner, nn.Linear | nn.MultiheadAttention)
    return kinds <= ROUNDED_KINDS and is_product


def warn_if_unsharded(holders: Holders, strategy: Strategy, replicas: Replicas) -> None:
    """Log a warning if several ranks hold each weight, and none of them share its state."""
    held = [devices for _, devices in holders.trained() if len(devices) > 1]
    groups = [group for devices in held for group in replicas.sharing_groups(devices)]
    if strategy.shard_state != "none" and groups and max(map(len, groups)) == 1:
        _log.warning(
            "shard_state %s divides no weight, because each host (or averaged replica) holds "
            "each weight on one rank: drop it, or its _in_node",
            strategy.shard_state,
        )


class Exchange(NamedTuple):
    """Parts that a rank sends to and receives from another one, by their holders' numbers."""

    rank: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


def plan_exchanges(devices: Group, rank: int, node_of: Sequence[object]) -> list[list[Exchange]]:
    """The exchanges of a rank with the others of a unit: at once, or, where several nodes have
    equally many, between nodes and then within its node."""
    place = {device: number for number, device in enumerate(devices)}
    nodes = equal_nodes(devices, node_of)
    if len(nodes) == 1 or len(nodes[0]) == 1:
        others = (other for other in devices if other != rank)
        return [[Exchange(other, (place[rank],), (place[other],)) for other in others]]
    columns = {holder: column for column in zip(*nodes, strict=True) for holder in column}
    row = next(node for node in nodes if rank in node)

    def parts(device: int) -> tuple[int, ...]:
        return tuple(place[holder] for holder in columns[device])

    return [
        [Exchange(d, (place[rank],), (place[d],)) for d in columns[rank] if d != rank],
        [Exchange(d, parts(rank), parts(d)) for d in row if d != rank],
    ]


def _messages(
    slices: Sequence[SharedSlice], dtypes: Sequence[torch.dtype]
) -> list[tuple[list[SharedSlice], torch.dtype]]:
    """The slices of each message between two holders, and its dtype: large ones alone, small ones
    of one dtype together."""
    large: list[tuple[list[SharedSlice], torch.dtype]] = []
    small: dict[torch.dtype, list[SharedSlice]] = {}
    for shared, dtype in zip(slices, dtypes, strict=True):
        if shared.parameter.nbytes >= LARGEST_JOINED_BYTES:
            large.append(([shared], dtype))
        else:
            small.setdefault(dtype, []).append(shared)
    return large + [(joined, dtype) for dtype, joined in small.items()]


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class WeightUnit:
    """One unit on a rank that holds it.

    Args:
        number: among all units, equal on all ranks.
        group: process group of its devices.
        rounded: dtype of autocast, in which freed weights travel that it rounds; None without it.

    Attributes:
        n_bytes: that are gathered.
        memory: of each slice, and its full size.
        is_live: whether its slices have memory, or will when `finish` returns.
    """

    def __init__(
        self,
        number: int,
        plan: UnitPlan,
        slices: Mapping[WeightSlice, SharedSlice],
        group: Any,
        world: World,
        rounded: torch.dtype | None,
    ) -> None:
        self.number, self.plan = number, plan.unit
        self._slices = [slices[piece] for piece in plan.pieces]
        self._dtypes = [
            rounded if rounded and is_rounded and self.plan.is_freed else shared.parameter.dtype
            for shared, is_rounded in zip(self._slices, plan.are_rounded, strict=True)
        ]
        self._messages = _messages(self._slices, self._dtypes)
        self._group, self._world = group, world
        self._here = self.plan.devices.index(world.rank)
        self._planned = plan_exchanges(self.plan.devices, world.rank, world.hostnames)
        parameters = [shared.parameter for shared in self._slices]
        self.n_bytes = sum(
            each.numel() * dtype.itemsize
            for each, dtype in zip(parameters, self._dtypes, strict=True)
        )
        self.memory = [(each.untyped_storage(), each.nbytes) for each in parameters]
        self.is_live = not self.plan.is_freed
        self._left: list[list[Exchange]] = []
        self._works: list[Any] = []
        self._received: list[tuple[Tensor, list[Tensor]]] = []
        self._parts: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def start(self, *, is_muted: bool) -> None:
        """Allocate the slices, and start to exchange their parts; all holders must call it in the
        same order of units.

        Args:
            is_muted: without communication.
        """
        if self.plan.is_freed:
            for storage, n_bytes in self.memory:
                storage.resize_(n_bytes)
        self.is_live = True
        for shared, dtype in zip(self._slices, self._dtypes, strict=True):
            if self.plan.is_freed and shared.own is not None:
                shared.rows(self._here).copy_(flat(shared.own.data).to(dtype))
        own = [_joined(rows).to(self._world.wire, dtype) for rows, dtype in self._rows(self._here)]
        if is_muted:
            return
        self._parts = {self._here: own}
        self._left = list(self._planned)
        self._exchange()
        while self._left and self._world.backend == "nccl":
            self._exchange()  # after the former on NCCL's stream

    def _exchange(self) -> None:
        """Start the next exchanges with other ranks."""
        operations = []
        for rank, sent, received in self._left.pop(0):
            for tensor in (tensor for number in sent for tensor in self._parts[number]):
                if tensor.numel():
                    operations.append(
                        dist.P2POp(dist.isend, tensor, rank, self._group, self.number)
                    )
            for number in received:
                self._parts[number] = [self._buffer(*each) for each in self._rows(number)]
                operations += [
                    dist.P2POp(dist.irecv, buffer, rank, self._group, self.number)
                    for buffer in self._parts[number]
                    if buffer.numel()
                ]
        self._works += start_messages(operations)

    def _rows(self, holder: int) -> list[tuple[list[Tensor], torch.dtype]]:
        """A holder's part of each message, with the dtype in which it travels."""
        return [([each.rows(holder) for each in slices], d) for slices, d in self._messages]

    def _buffer(self, rows: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Memory to receive rows in: their own if possible."""
        is_own = self._world.wire == self._world.device and rows[0].dtype == dtype
        if len(rows) == 1 and is_own:
            return rows[0]
        n = sum(each.numel() for each in rows)
        buffer = torch.empty(n, dtype=dtype, device=self._world.wire)
        self._received.append((buffer, rows))
        return buffer

    @torch.no_grad()
    def finish(self, phases: Phases) -> None:
        """Wait until the slices are complete."""
        if self._works or self._left:
            name = f"weights of unit {self.number}"
            phases.wait(self._wait, name=name, n_bytes=self.n_bytes)
        for buffer, rows in self._received:
            for target, values in zip(rows, buffer.split([r.numel() for r in rows]), strict=True):
                target.copy_(values)
        self._received, self._parts = [], {}

    def _wait(self) -> None:
        first = self._slices[0].piece.name
        what = f"the weights of {first} and {len(self._slices) - 1} others"
        devices = self.plan.devices
        with blaming_peers(f"{what} did not reach ranks {list(devices)}", devices):
            while self._works or self._left:
                for work in self._works:
                    work.wait()
                self._works = []
                if self._left:
                    self._exchange()

    def free(self) -> None:
        """Free the slices' memory; the own parts stay."""
        if self.plan.is_freed:
            for storage, _ in self.memory:
                storage.resize_(0)
            self.is_live = False

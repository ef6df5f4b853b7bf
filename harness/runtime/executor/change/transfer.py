"""Bring the state of a running strategy into the engine of the next one, slice by slice.

A rank keeps the regions that it holds; a slice that stays whole is shared, not copied. All regions
for another rank travel in one message. The state of the old engine does not change.

Every rank knows the holders of every slice under both strategies, so it works out all migrations
without communication. Slices of one tensor are equal or disjoint within a strategy, so each region
of a new slice lies in exactly one old slice:

    before      rank 0 |======|      rank 1 |======|
    after       rank 0 |===|   rank 1 |=========|
                               kept: the right part; from rank 0: the rest
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.errors import StrategyError
from harness.runtime.engines.replicas import fingerprint_of
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.shards.pointwise import RandomState
from harness.runtime.executor.state.state import StateGatherer
from harness.runtime.executor.state.weights import Holders, Weights
from harness.runtime.ranks.gather import gather_objects
from harness.runtime.ranks.messages import start_messages
from harness.runtime.ranks.world import World

# The devices that hold each slice.
Placement = Mapping[WeightSlice, tuple[int, ...]]
# Bytes that travel, by (sender, reader).
PairBytes = dict[tuple[int, int], int]


@dataclass(frozen=True)
class Migration:
    """A region of one tensor that rank `target` needs and rank `source` holds.

    Attributes:
        region: in the whole tensor.
        before, after: the slice that the source holds, and the one that the target needs.
        source: equal to `target` if the rank holds the region already.
    """

    region: WeightSlice
    before: WeightSlice
    after: WeightSlice
    source: int
    target: int


def find_migrations(before: Placement, after: Placement) -> list[Migration]:
    """All migrations of a change, in the same order on every rank; kept regions included.

    Of several holders, the one that sends least so far sends a region.

    Raises:
        StrategyError: a region that the new strategy needs is held by no rank.
    """
    old: dict[str, list[WeightSlice]] = defaultdict(list)
    for piece in sorted(before):
        old[piece.name].append(piece)
    migrations: list[Migration] = []
    n_sent: Counter[int] = Counter()
    for piece in sorted(after):
        parts = [(held, held.common(piece)) for held in old[piece.name]]
        known = [(held, region) for held, region in parts if region is not None]
        n_held = sum(region.n_elements for _, region in known)
        if n_held != piece.n_elements:
            raise StrategyError(
                f"the next strategy needs {piece.n_elements} elements of {piece.name}, the ranks "
                f"hold {n_held} of them: change to a strategy of the same model"
            )
        for target in after[piece]:
            for held, region in known:
                holders = before[held]
                source = target
                if target not in holders:
                    source = min(holders, key=lambda rank: (n_sent[rank], rank))
                migration = Migration(region, held, piece, source, target)
                n_sent[source] += region.n_elements if source != target else 0
                migrations.append(migration)
    return migrations


# Key of a tensor of the model itself, beside the keys of the optimizer's state.
MODEL = ""

Bits = tuple[int, ...]
# Of a fingerprint: a message by its ends, or a slice and a key of its state.
Subject = tuple[int, int] | tuple[WeightSlice, str]
# Values of the optimizer's state by key; the dtype stands for a tensor with the slice's shape.
Inventory = dict[WeightSlice, dict[str, Any]]


@dataclass(frozen=True)
class HeldState:
    """The state of one engine on this rank, and the holders of all slices.

    Attributes:
        random: counts the steps.
    """

    weights: Weights
    owners: Owners
    holders: Holders
    optimizer: Optimizer
    gatherer: StateGatherer
    random: RandomState

    def tensor(self, piece: WeightSlice, key: str) -> Tensor:
        if key == MODEL:
            return self.model(piece).detach()
        found: Tensor = self.optimizer.state[self.owners.own[piece]][key]
        return found.detach()

    def model(self, piece: WeightSlice) -> Tensor:
        """The tensor of the model that holds a slice between two steps."""
        is_own = piece not in self.weights.held or piece in self.owners.freed
        return self.owners.own[piece] if is_own else self.weights.held[piece]

    def values(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of a parameter, as in an inventory."""
        found = self.optimizer.state.get(parameter, {})
        return {key: _summary(found[key], parameter.shape) for key in sorted(found)}

    def inventory(self, rank: int) -> Inventory:
        """The optimizer's state of the slices that this rank tells of: one rank for each."""
        return {
            piece: self.values(parameter)
            for piece, parameter in self.owners.own.items()
            if self.owners.of(piece) == rank
        }


class _Block(NamedTuple):
    """The region of one tensor in a migration."""

    migration: Migration
    key: str
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return self.migration.region.n_elements * self.dtype.itemsize


class StateTransfer:
    """The transfer of one change; all ranks must construct it, `pack` and then `exchange`.

    Attributes:
        n_bytes: bytes that this rank receives, by the rank that sends them.
    """

    def __init__(self, before: HeldState, after: HeldState, world: World) -> None:
        self._before, self._after, self._world = before, after, world
        self._inventory: Inventory = {}
        for part in gather_objects(world, before.inventory(world.rank)):
            self._inventory |= part
        here = world.rank
        blocks = self._blocks(*find_all_migrations(before, after))
        self._kept: list[_Block] = []
        self._sent: dict[int, list[_Block]] = defaultdict(list)
        self._received: dict[int, list[_Block]] = defaultdict(list)
        for block in blocks:
            source, target = block.migration.source, block.migration.target
            if source == target:
                self._kept.append(block)
            elif source == here:
                self._sent[target].append(block)
            else:
                self._received[source].append(block)
        self.n_bytes = {rank: _n_bytes(own) for rank, own in self._received.items()}
        self._outgoing: dict[int, Tensor] = {}
        self._incoming: dict[int, Tensor] = {}

    def _blocks(
        self, of_weights: Sequence[Migration], of_state: Sequence[Migration]
    ) -> list[_Block]:
        """Every tensor that this rank sends, receives or keeps; larger elements first, so that all
        are aligned."""
        here = self._world.rank
        found: list[_Block] = []
        for migration in of_weights:
            if here not in (migration.source, migration.target):
                continue
            is_sent = migration.source == here
            state, piece = (
                (self._before, migration.before) if is_sent else (self._after, migration.after)
            )
            found.append(_Block(migration, MODEL, state.model(piece).dtype))
        for migration in of_state:
            if here in (migration.source, migration.target):
                values = self._inventory.get(migration.before, {})
                found += [_Block(migration, k, v) for k, v in values.items() if _is_tensor(v)]
        return sorted(found, key=lambda block: -block.dtype.itemsize)

    @torch.no_grad()
    def pack(self) -> None:
        """Allocate the new state and all messages, and fill those that this rank sends."""
        self._make_optimizer_state()
        self._outgoing = {rank: self._packed(blocks) for rank, blocks in self._sent.items()}
        self._incoming = {rank: self._buffer(n) for rank, n in self.n_bytes.items()}

    @torch.no_grad()
    def exchange(self) -> None:
        """Fill the weights and the optimizer of the new engine.

        Raises:
            RuntimeError: another rank died or hangs.
        """
        sent, received = self._outgoing, self._incoming
        operations = [dist.P2POp(dist.isend, flat, rank) for rank, flat in sent.items()]
        operations += [dist.P2POp(dist.irecv, flat, rank) for rank, flat in received.items()]
        works = start_messages(operations)
        for block in self._kept:
            self._keep(block)
        for work in works:
            work.wait()
        for rank, flat in received.items():
            for block, view in _views(flat, self._received[rank]):
                _region(block, self._after, block.migration.after).copy_(view)

    def message_bits(self) -> dict[Subject, Bits]:
        """Fingerprints of this rank's messages, by (sender, reader)."""
        here = self._world.rank
        found: dict[Subject, Bits] = {
            (here, rank): _bits(flat) for rank, flat in self._outgoing.items()
        }
        return found | {(rank, here): _bits(flat) for rank, flat in self._incoming.items()}

    def replica_bits(self) -> dict[Subject, Bits]:
        """Fingerprints of the new state that this rank shares with others."""
        after = self._after
        found: dict[Subject, Bits] = {
            (piece, MODEL): _bits(after.tensor(piece, MODEL))
            for piece in after.owners.trained(after.weights)
            if len(after.owners.placement()[piece]) > 1
        }
        keepers = after.owners.keepers()
        return found | {
            (piece, key): _bits(after.tensor(piece, key))
            for piece, parameter in after.owners.own.items()
            if len(keepers[piece]) > 1
            for key, value in after.values(parameter).items()
            if _is_tensor(value)
        }

    def _make_optimizer_state(self) -> None:
        """Allocate the tensors of parameters' shapes, and set all other values."""
        first: dict[str, dict[str, Any]] = {}
        for piece, values in self._inventory.items():
            first.setdefault(piece.name, values)
        groups = self._before.optimizer.param_groups, self._after.optimizer.param_groups
        for old, new in zip(*groups, strict=True):
            new.update({key: value for key, value in old.items() if key != "params"})
        is_on_device = bool(new.get("fused") or new.get("capturable"))
        for piece, parameter in self._after.owners.own.items():
            for key, value in first.get(piece.name, {}).items():
                if _is_tensor(value):
                    made = torch.empty_like(parameter, dtype=value)
                else:
                    made = value.to(parameter.device if is_on_device else "cpu", copy=True)
                self._after.optimizer.state[parameter][key] = made

    def _buffer(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self._world.wire)

    def _packed(self, blocks: Sequence[_Block]) -> Tensor:
        flat = self._buffer(_n_bytes(blocks))
        for block, view in _views(flat, blocks):
            view.copy_(_region(block, self._before, block.migration.before))
        return flat

    def _keep(self, block: _Block) -> None:
        before, after = block.migration.before, block.migration.after
        old, new = self._before.tensor(before, block.key), self._after.tensor(after, block.key)
        # All holders of a slice have its elements in one order, which the new strategy may change.
        if before != after or old.stride() != new.stride():
            _region(block, self._after, after).copy_(_region(block, self._before, before))
            return
        if block.key == MODEL:
            self._after.model(after).data = old
        else:
            self._after.optimizer.state[self._after.owners.own[after]][block.key] = old


def _region(block: _Block, state: HeldState, piece: WeightSlice) -> Tensor:
    """A block within the slice that holds it."""
    return block.migration.region.within(piece).take(state.tensor(piece, block.key))


def find_all_migrations(
    before: HeldState, after: HeldState
) -> tuple[list[Migration], list[Migration]]:
    """Migrations of the model's tensors, and of the optimizer's state.

    A layer that has been frozen leaves its optimizer state behind.
    """
    weights = find_migrations(before.owners.placement(), after.owners.placement())
    old, new = before.owners.keepers(), after.owners.keepers()
    trained = {piece.name for piece in old} & {piece.name for piece in new}
    if not (before.owners.is_sharded or after.owners.is_sharded):
        return weights, [m for m in weights if m.region.name in trained]
    kept, wanted = (
        {piece: ranks for piece, ranks in keepers.items() if piece.name in trained}
        for keepers in (old, new)
    )
    return weights, find_migrations(kept, wanted)


def _summary(value: Tensor, shape: torch.Size) -> Tensor | torch.dtype:
    """A value as in an inventory; counters are on the host, because ranks have other devices."""
    return value.dtype if value.shape == shape else value.cpu()


def _is_tensor(value: Any) -> bool:
    """Whether a value of an inventory stands for a tensor with the slice's shape."""
    return isinstance(value, torch.dtype)


def _n_bytes(blocks: Sequence[_Block]) -> int:
    return sum(block.n_bytes for block in blocks)


def _views(flat: Tensor, blocks: Sequence[_Block]) -> Iterator[tuple[_Block, Tensor]]:
    """Each block with its part of a message, in the shape of its region."""
    at = 0
    for block in blocks:
        shape = [stop - start for start, stop in block.migration.region.intervals]
        part = flat[at : at + block.n_bytes]
        yield block, part.view(block.dtype).view(shape)
        at += block.n_bytes


def _bits(tensor: Tensor) -> Bits:
    return tuple(fingerprint_of(tensor).tolist())

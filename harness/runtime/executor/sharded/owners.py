"""The parts of the trained slices, and the rank that updates each.

Without sharding every holder updates its copy of a slice. With it each of n holders owns 1/n, whose
optimizer state it alone keeps:

    slice    rows 0-3: rank 0 | rows 4-7: rank 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harness.domain.shard_state import Group
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.sharded.replicas import Replicas
from harness.runtime.executor.state.weights import Holders, Weights


def part_holders(piece: WeightSlice, groups: Sequence[Group]) -> dict[WeightSlice, Group]:
    """The parts of a slice that are not empty, with their holders, in groups of one size that each
    keep the whole."""
    alike = enumerate(zip(*groups, strict=True))
    parts = {piece.part(k, len(groups[0])): holders for k, holders in alike}
    return {part: holders for part, holders in parts.items() if part is not None}


class SharedSlice(NamedTuple):
    """This rank's copy of a slice that several ranks hold, where state is sharded.

    Attributes:
        devices: that share it with this rank.
        parts: each of the devices' part, ascending; None for an empty one.
        own: this rank's part; None if it is empty. A view of the parameter, unless that is freed.
        here: this rank's place among the devices.
    """

    piece: WeightSlice
    parameter: nn.Parameter
    devices: Group
    parts: tuple[WeightSlice | None, ...]
    own: nn.Parameter | None
    here: int

    @property
    def own_part(self) -> WeightSlice:
        """The slice of this rank's part, which must not be empty."""
        part = self.parts[self.here]
        assert part is not None
        return part

    def size(self, holder: int) -> int:
        """Elements of a holder's part."""
        part = self.parts[holder]
        return 0 if part is None else part.n_elements

    def rows(self, holder: int) -> Tensor:
        """The flat memory of a holder's part within the parameter."""
        part = self.parts[holder]
        return self.parameter.data.new_empty(0) if part is None else flat(_view(part, self))


class Owners:
    """Who owns which part, on all ranks, and this rank's own parameters.

    Args:
        weights: this rank's slices, in memory.
        freed: slices that are kept in parts only; their own parts are copies.

    Attributes:
        own: the parameters that this rank updates, in the order of the model.
        shared: this rank's slices that several hold, if state is sharded.
        freed: see above.
    """

    def __init__(
        self,
        holders: Holders,
        weights: Weights,
        replicas: Replicas,
        rank: int,
        freed: Iterable[WeightSlice],
    ) -> None:
        self._rank, self._holders = rank, holders
        self._sharing = replicas.sharing_groups
        self.is_sharded = replicas.is_sharded
        self.freed = frozenset(freed)
        self._ranks: dict[WeightSlice, Group] = {}
        self._parts: dict[WeightSlice, tuple[WeightSlice | None, ...]] = {}
        for piece, devices in holders.trained():
            if not self.is_sharded or len(devices) == 1:
                self._ranks[piece] = devices
                continue
            groups = self._sharing(devices)
            n = len(groups[0])
            self._parts[piece] = tuple(piece.part(k, n) for k in range(n))
            self._ranks |= part_holders(piece, groups)
        # Averages change all shared slices, so their parts are the state.
        self._in_parts = frozenset(self._parts) if replicas.n > 1 else self.freed
        self.own: dict[WeightSlice, nn.Parameter] = {}
        self.shared: list[SharedSlice] = []
        for piece, parameter in weights.trainable().items():
            if piece not in self._parts:
                self.own[piece] = parameter
                continue
            one = self._shared(piece, parameter)
            self.shared.append(one)
            if one.own is not None:
                self.own[one.own_part] = one.own

    def _shared(self, piece: WeightSlice, parameter: nn.Parameter) -> SharedSlice:
        groups, parts = self._sharing(self._holders.of(piece)), self._parts[piece]
        devices = next(group for group in groups if self._rank in group)
        _make_dense(parameter)
        here = devices.index(self._rank)
        one, own = SharedSlice(piece, parameter, devices, parts, None, here), None
        if parts[here] is not None:
            view = _view(one.own_part, one)
            own = nn.Parameter(view.clone() if piece in self.freed else view)
        if piece in self.freed:
            # Memory of its own, which can be freed and allocated again.
            parameter.data = torch.empty_like(parameter)
            parameter.untyped_storage().resize_(0)
        return one._replace(own=own)

    def rebind(self) -> None:
        """Point views of parameters at their memory, after it has been replaced."""
        for one in self.shared:
            if one.own is not None and one.piece not in self.freed:
                one.own.data = _view(one.own_part, one)

    def of(self, piece: WeightSlice) -> int:
        """The rank that writes the optimizer's state of a part."""
        return self._ranks[piece][0]

    def keepers(self) -> dict[WeightSlice, Group]:
        """The ranks that keep the optimizer's state of each part."""
        return dict(self._ranks)

    def placement(self) -> dict[WeightSlice, Group]:
        """The ranks that hold each slice of the model between two steps."""
        found = {p: devices for p, devices in self._holders.items() if p not in self._in_parts}
        for piece in self._in_parts:
            found |= part_holders(piece, self._sharing(self._holders.of(piece)))
        return found

    def trained(self, weights: Weights) -> dict[WeightSlice, nn.Parameter]:
        """This rank's trained slices between two steps."""
        trained = weights.trainable().items()
        whole = {piece: tensor for piece, tensor in trained if piece not in self._in_parts}
        return whole | {
            one.own_part: one.own
            for one in self.shared
            if one.piece in self._in_parts and one.own is not None
        }

    def module(self, weights: Weights) -> nn.Module:
        """The trained parameters between two steps, without the memory of freed ones."""
        return nn.ParameterList(self.trained(weights).values()) if self.freed else weights

    def held(self, weights: Weights) -> dict[WeightSlice, Tensor]:
        """This rank's slices of the model between two steps."""
        kept = {p: tensor for p, tensor in weights.held.items() if p not in self._in_parts}
        return kept | self.trained(weights)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of memory, as one dim; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _view(part: WeightSlice, one: SharedSlice) -> Tensor:
    return part.within(one.piece).take(one.parameter.data)


def _make_dense(parameter: nn.Parameter) -> None:
    """Lay out a parameter such that its parts are contiguous in memory."""
    is_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    if not (parameter.is_contiguous() or (is_last and parameter.shape[0] > 1)):
        parameter.data = parameter.data.contiguous()

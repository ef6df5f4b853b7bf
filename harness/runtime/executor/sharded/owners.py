"""The parts of the trained slices, and the rank that updates each.

Without sharding every holder updates its copy of a slice. With it each of n holders owns 1/n, whose
optimizer state it alone keeps:

    slice    rows 0-3: rank 0 | rows 4-7: rank 1

Groups of holders that each keep the whole slice in parts (`shard_state.sharing_groups`) sum the
gradients of equal parts with each other at the end of a step. Gradients are summed to the owners by
a reduce-scatter, in buckets:

    backward of a microbatch  |--- p5 p4 ---|--- p3 p2 ---|
    bucket 0  (p5 p4)          copied, freed |--- to the owners ---| added to the own parts
    bucket 1  (p3 p2)                                       |--- ... ---|

Each microbatch's gradients are summed after its backward, so that a rank never keeps whole
gradients of more than the buckets that are on their way. Over gloo a reduce-scatter is an
all-to-all and a local sum, because gloo's own is an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.strategy import Strategy
from harness.runtime.devices.precision import reduced
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.sums import Bucket, buckets_of, view_like
from harness.runtime.executor.state.weights import Holders, Weights
from harness.runtime.executor.transport.groups import scatter_sum
from harness.runtime.ranks.world import World

Group = tuple[int, ...]


# The groups of some holders that each keep a slice in parts.
Sharing = Callable[[Group], Sequence[Group]]


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
        alike: holders of the same part, with this rank.
        parts: each of the devices' part, ascending; None for an empty one.
        own: this rank's part; None if it is empty. A view of the parameter, unless that is freed.
        here: this rank's place among the devices.
    """

    piece: WeightSlice
    parameter: nn.Parameter
    devices: Group
    alike: Group
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
        sharing: equal on all ranks.
        freed: slices that are kept in parts only; their own parts are copies.
        is_averaging: all shared slices are parts of the state, which averages change.

    Attributes:
        own: the parameters that this rank updates, in the order of the model.
        shared: this rank's slices that several hold, if state is sharded.
        freed: see above.
    """

    def __init__(
        self,
        holders: Holders,
        weights: Weights,
        strategy: Strategy,
        rank: int,
        sharing: Sharing,
        freed: Iterable[WeightSlice],
        *,
        is_averaging: bool = False,
    ) -> None:
        self._strategy, self._rank, self._holders = strategy, rank, holders
        self._sharing = sharing
        self.is_sharded = strategy.shard_state != "none"
        self.freed = frozenset(freed)
        self._ranks: dict[WeightSlice, Group] = {}
        self._parts: dict[WeightSlice, tuple[WeightSlice | None, ...]] = {}
        for piece, devices in holders.trained():
            if not self.is_sharded or len(devices) == 1:
                self._ranks[piece] = devices
                continue
            n = len(sharing(devices)[0])
            self._parts[piece] = tuple(piece.part(k, n) for k in range(n))
            self._ranks |= part_holders(piece, sharing(devices))
        self._in_parts = frozenset(self._parts) if is_averaging else self.freed
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
        alike = tuple(group[here] for group in groups)
        one, own = SharedSlice(piece, parameter, devices, alike, parts, None, here), None
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

    def assign_gradients(self) -> None:
        """Let own parts of all-reduced gradients refer to them."""
        if self._strategy.shards_gradients:
            return  # they have sums of their own
        for one in self.shared:
            gradient = one.parameter.grad
            if one.own is not None and gradient is not None:
                one.own.grad = one.own_part.within(one.piece).take(gradient)

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


class ScatterBucket(Bucket):
    """Gradients that are summed to their owners together.

    Attributes:
        flat: gradients of the microbatch, the first holder's parts first; None between two.
        sums: of this rank's own parts, over all devices and microbatches.
    """

    most_on_their_way = 1  # because their memory is not freed yet

    def __init__(
        self,
        name: str,
        slices: Sequence[SharedSlice],
        world: World,
        reduce_dtype: str = "fp32",
    ) -> None:
        parameters = [one.parameter for one in slices]
        super().__init__(name, slices[0].piece.name, parameters, reduce_dtype)
        self.slices, self.here = list(slices), slices[0].here
        self.n_parts = len(slices[0].devices)
        self._is_nccl = world.backend == "nccl"
        first = self.slices[0].parameter
        holders = range(self.n_parts)
        self.sizes = [sum(one.size(holder) for one in self.slices) for holder in holders]
        self.sums = torch.zeros(self.sizes[self.here], dtype=first.dtype, device=first.device)
        self._places: dict[nn.Parameter, list[int]] = {one.parameter: [] for one in slices}
        at = 0
        for holder in holders:
            for one in self.slices:
                self._places[one.parameter].append(at)
                at += one.size(holder)
        self._slices = {one.parameter: one for one in slices}
        self._taken: set[nn.Parameter] = set()
        self.flat: Tensor | None = None
        self._sent: Tensor | None = None
        self._received: Tensor | None = None

    def reset(self) -> None:
        self.sums.zero_()

    def take(self, parameter: nn.Parameter) -> None:
        if self.flat is None:
            self.flat = self.sums.new_empty(self.n_elements)
        one, gradient = self._slices[parameter], parameter.grad
        for holder, at in enumerate(self._places[parameter]):
            part = one.parts[holder]
            if part is None:
                continue
            target = self.flat[at : at + one.size(holder)]
            if gradient is not None:
                values = _in_order(part.within(one.piece).take(gradient), parameter)
            if gradient is None and parameter not in self._taken:
                target.zero_()
            elif gradient is not None and parameter in self._taken:
                target.add_(values)
            elif gradient is not None:
                target.copy_(values)
        parameter.grad = None
        self._taken.add(parameter)

    def collect(self) -> None:
        for one in self.slices:
            if one.parameter not in self._taken or one.parameter.grad is not None:
                self.take(one.parameter)
        self._taken.clear()

    def pack(self) -> None:
        assert self.flat is not None, "a bucket has parameters"
        # Kept until `finish`: the mark at its end makes NCCL's work forget its tensors.
        self._sent, self.flat = reduced(self.flat, self.reduce_dtype), None
        if self.n_parts == 1:
            self._received = self._sent
            return
        n_received = 1 if self._is_nccl else self.n_parts
        self._received = self._sent.new_empty(n_received * self.sizes[self.here])

    def start(self, group: Any) -> Any:
        assert self._sent is not None, "it is packed"
        assert self._received is not None, "it is packed"
        if self.n_parts == 1:
            return None
        if self._is_nccl:
            received, sent = map(_real_of, (self._received, self._sent))
            if len(set(self.sizes)) == 1:  # a list would be copied into memory that nobody keeps
                return scatter_sum(received, sent, group, is_async=True)
            parts = list(sent.split(self.sizes))
            return dist.reduce_scatter(received, parts, group=group, async_op=True)
        counts = [self.sizes[self.here]] * len(self.sizes)
        return dist.all_to_all_single(
            self._received, self._sent, counts, self.sizes, group=group, async_op=True
        )

    @torch.no_grad()
    def finish(self) -> None:
        assert self._received is not None, "its exchange has begun"
        for part in self._received.view(-1, len(self.sums)) if len(self.sums) else ():
            self.sums += part
        self._sent = self._received = None

    def start_outer(self, group: Any) -> Any:
        self._sent = reduced(self.sums, self.reduce_dtype)
        return dist.all_reduce(self._sent, group=group, async_op=True)

    @torch.no_grad()
    def finish_outer(self) -> None:
        if self._sent is not self.sums and self._sent is not None:
            self.sums.copy_(self._sent)
        self._sent = None

    def assign(self) -> None:
        first = self._places[self.slices[0].parameter][self.here]
        for one in self.slices:
            if one.own is not None:
                at = self._places[one.parameter][self.here] - first
                one.own.grad = view_like(one.own, self.sums, at)


def _real_of(tensor: Tensor) -> Tensor:
    """A view with real numbers, because NCCL knows no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _in_order(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """The elements of a part of a gradient in the order of the parameter's memory."""
    if part.stride() == parameter.stride():
        return flat(part)
    strides = parameter.stride()
    return part.permute(sorted(range(part.dim()), key=lambda dim: -strides[dim])).reshape(-1)


def scatter_buckets(
    shared: Iterable[SharedSlice],
    holders_of: Callable[[WeightSlice], Group],
    bucket_bytes: int,
    world: World,
    reduce_dtype: str,
) -> Mapping[Group, Sequence[Bucket]]:
    """The buckets of sharded weights, by all devices that hold them."""
    slices = {one.parameter: one for one in shared}
    found: dict[Group, list[ScatterBucket]] = defaultdict(list)
    members = ((holders_of(one.piece), parameter) for parameter, one in slices.items())
    for number, (devices, chunk) in enumerate(buckets_of(members, bucket_bytes)):
        own = [slices[parameter] for parameter in chunk]
        found[devices].append(ScatterBucket(f"bucket{number}", own, world, reduce_dtype))
    return found

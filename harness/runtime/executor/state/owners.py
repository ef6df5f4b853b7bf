"""The slices that a rank updates, and the way of the new weights to their other holders.

With replicated optimizer state every holder updates its copy. With sharded state each slice has one
owner, which alone keeps the optimizer's state of it:

    gradients  all-reduced to every holder
    optimizer  rank 0: a b    rank 1: c d
    weights    rank 0 -a b->  rank 1,  rank 1 -c d-> rank 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.owners import owners_of
from harness.errors import PeerError
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.loss_scale import LossScale
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.state.weights import Holders, Weights
from harness.runtime.ranks.failures import gist
from harness.runtime.ranks.world import World

Group = tuple[int, ...]


class Owners:
    """The ranks that update each trained slice; equal on all ranks."""

    def __init__(self, holders: Holders, *, is_sharded: bool) -> None:
        self.is_sharded = is_sharded
        trained = holders.trained()
        sizes = [math.prod(stop - start for start, stop in p.intervals) for p, _ in trained]
        slices = [(size, devices) for size, (_, devices) in zip(sizes, trained, strict=True)]
        owners = owners_of(slices) if is_sharded else [devices[0] for _, devices in trained]
        self._of = {piece: owner for (piece, _), owner in zip(trained, owners, strict=True)}
        self._holders = dict(trained)

    def of(self, piece: WeightSlice) -> int:
        """The rank that writes the optimizer's state of a slice."""
        return self._of[piece]

    def keepers(self) -> dict[WeightSlice, Group]:
        """The ranks that keep the optimizer's state of each trained slice."""
        if self.is_sharded:
            return {piece: (owner,) for piece, owner in self._of.items()}
        return dict(self._holders)

    def updated(self, weights: Weights, rank: int) -> dict[WeightSlice, nn.Parameter]:
        """The parameters that a rank updates, in the order of the model."""
        return {
            piece: parameter
            for piece, parameter in weights.trainable().items()
            if not self.is_sharded or self._of[piece] == rank
        }

    def shared(self, weights: Weights) -> dict[Group, dict[int, list[nn.Parameter]]]:
        """This rank's copies of slices that several hold, by holders and owner; all in the same
        order on every holder."""
        found: dict[Group, dict[int, list[nn.Parameter]]] = {}
        trainable = weights.trainable()
        for piece, devices in self._holders.items():
            if piece in trainable and len(devices) > 1:
                by_owner = found.setdefault(devices, {})
                by_owner.setdefault(self._of[piece], []).append(trainable[piece])
        return found


class WeightUpdater:
    """Steps the optimizer on the slices that this rank updates, and sends them to other holders.

    Args:
        groups: process groups by their devices.
    """

    def __init__(
        self,
        owners: Owners,
        weights: Weights,
        groups: Mapping[Group, Any],
        options: OptimizerOptions,
        world: World,
    ) -> None:
        self._weights, self._groups, self._world = weights, groups, world
        updated = list(owners.updated(weights, world.rank).values())
        self.optimizer = make_optimizer(
            nn.ParameterList(updated) if updated else nn.Linear(1, 1), options, world.device
        )
        self._parts: list[tuple[Group, int, list[nn.Parameter]]] = []
        if owners.is_sharded:
            for devices, by_owner in sorted(owners.shared(weights).items()):
                for owner, parameters in sorted(by_owner.items()):
                    for dtype in sorted({p.dtype for p in parameters}, key=str):
                        chosen = [p for p in parameters if p.dtype == dtype]
                        self._parts.append((devices, owner, chosen))
        sizes = [p.numel() * p.element_size() for _, _, part in self._parts for p in part]
        self._n_bytes = sum(sizes)

    def update(self, phases: Phases, scale: LossScale, *, is_muted: bool) -> None:
        """Update the weights and free their gradients; all holders must call it.

        Args:
            scale: skips the step where gradients overflowed.
            is_muted: without communication.

        Raises:
            PeerError: another holder died or hangs; NCCL ends this process instead.
        """
        phases.begin("optimizer")
        scale.step(self.optimizer, is_muted=is_muted)
        for parameter in self._weights.parameters():
            parameter.grad = None
        if self._parts and not is_muted:
            phases.begin("communication", name="weights", n_bytes=self._n_bytes)
            self._spread()

    @torch.no_grad()
    def _spread(self) -> None:
        flats = [self._flat(owner, part) for _, owner, part in self._parts]
        works = [
            dist.broadcast(flat, owner, group=self._groups[devices], async_op=True)
            for (devices, owner, _), flat in zip(self._parts, flats, strict=True)
        ]
        for (devices, owner, part), flat, work in zip(self._parts, flats, works, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerError(
                    f"the updated weights of rank {owner} did not reach ranks {list(devices)} "
                    f"({gist(error)}): one of them died or hangs, look at their logs",
                    devices,
                ) from error
            if owner != self._world.rank:
                for parameter, values in zip(
                    part, flat.split([p.numel() for p in part]), strict=True
                ):
                    parameter.copy_(values.view(parameter.shape))

    def _flat(self, owner: int, part: list[nn.Parameter]) -> Tensor:
        if owner == self._world.rank:
            return torch.cat([parameter.reshape(-1) for parameter in part])
        n_elements = sum(parameter.numel() for parameter in part)
        return torch.empty(n_elements, dtype=part[0].dtype, device=part[0].device)

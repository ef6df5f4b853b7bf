"""Norms of the gradients of each layer over several steps, by which layers are chosen to freeze."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from harness.domain.freezing import FreezableLayer
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.state.weights import Weights
from harness.runtime.ranks.world import World


class LayerNorms:
    """Adds up squares on the device; nothing waits for them before `take`."""

    def __init__(self, layers: Sequence[FreezableLayer], world: World) -> None:
        self._world, self._n_layers, self._n_steps = world, len(layers), 0
        self._layer_of = {name: k for k, layer in enumerate(layers) for name in layer.parameters}
        self._sums = self._zeros()

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._n_layers, dtype=torch.float64, device=self._world.device)

    @torch.no_grad()
    def add(self, weights: Weights, owners: Owners) -> None:
        """Add a step's gradients, after they have been reduced; one rank adds each slice."""
        self._n_steps += 1
        layer_of = {weights.names.get(name, name): k for name, k in self._layer_of.items()}
        own = [
            (layer_of[piece.name], parameter.grad)
            for piece, parameter in owners.own.items()
            if piece.name in layer_of and owners.of(piece) == self._world.rank
        ]
        found = [(k, gradient) for k, gradient in own if gradient is not None]
        if found:
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in found]))
            where = torch.tensor([k for k, _ in found], device=norms.device)
            self._sums.index_add_(0, where, norms.double().square())

    def take(self) -> list[float]:
        """The root mean square, over the steps since the last call, of each layer's norm; all ranks
        must call it. 0 for layers that are not trained."""
        if self._world.size > 1:
            dist.all_reduce(self._sums)
        found: list[float] = (self._sums / max(1, self._n_steps)).sqrt().tolist()
        self._sums, self._n_steps = self._zeros(), 0
        return found

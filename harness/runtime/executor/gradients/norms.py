"""Norms of summed gradients: of all, to clip them, and of each layer, to freeze by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from harness.domain.freezing import FreezableLayer
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.state.weights import Weights
from harness.runtime.ranks.world import World


def _own_gradients(owners: Owners, rank: int) -> list[tuple[str, Tensor]]:
    """Parameter and gradient of each slice that this rank, of those that hold it, accounts for."""
    own = [(p.name, x.grad) for p, x in owners.own.items() if owners.of(p) == rank]
    return [(name, gradient) for name, gradient in own if gradient is not None]


class GradientClip:
    """Scales gradients down to a norm of all of them, as torch's clip_grad_norm_ does.

    Args:
        most: the largest norm, of synchronous training; None: gradients stay.
    """

    def __init__(self, most: float | None, world: World) -> None:
        self._most, self._world = most, world

    @torch.no_grad()
    def apply(self, owners: Owners, phases: Phases, *, is_muted: bool) -> None:
        """Scale a step's gradients, after they have been reduced; all ranks must call it."""
        if self._most is None:
            return
        own = [gradient for _, gradient in _own_gradients(owners, self._world.rank)]
        square = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if own:
            square += torch.stack(torch._foreach_norm(own)).double().square().sum()
        if self._world.size > 1 and not is_muted:
            phases.wait(lambda: dist.all_reduce(square), name="gradient norm")
        factor = (self._most / (square.sqrt() + 1e-6)).clamp(max=1.0)
        gradients = [x.grad for x in owners.own.values() if x.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)


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
        own = _own_gradients(owners, self._world.rank)
        found = [(layer_of[name], gradient) for name, gradient in own if name in layer_of]
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

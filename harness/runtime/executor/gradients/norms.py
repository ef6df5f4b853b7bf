"""Norms of summed gradients: of all, to clip them, and of each layer, to freeze by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from harness.domain.freezing import FreezableLayer, FreezingState
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


@dataclass(frozen=True, kw_only=True)
class NormSums:
    """Sums over steps, known on every rank; see FreezingState."""

    squares: Tensor
    n_steps: int = 0
    decided: tuple[int, int, int] = (0, 0, 0)

    def state(self) -> FreezingState:
        since, interval, n_frozen = self.decided
        return FreezingState(
            since=since, interval=interval, n_frozen=n_frozen,
            squares=self.squares.tolist(), n_steps=self.n_steps,
        )  # fmt: skip


class LayerNorms:
    """Adds up squares on the device; nothing waits for them before `take`.

    Args:
        is_common: ranks exchange their squares in each step, so that no rank takes some with it.
        state: of a training that goes on.

    Attributes:
        sums: replaced, never altered.
    """

    def __init__(
        self,
        layers: Sequence[FreezableLayer],
        world: World,
        *,
        is_common: bool = False,
        state: FreezingState | None = None,
    ) -> None:
        self._world, self._is_common = world, is_common
        self._layer_of = {name: k for k, layer in enumerate(layers) for name in layer.parameters}
        state = state or FreezingState(squares=[0.0] * len(layers))
        self.sums = NormSums(
            squares=torch.tensor(state.squares, dtype=torch.float64, device=world.device),
            n_steps=state.n_steps,
            decided=(state.since, state.interval, state.n_frozen),
        )
        self._own = torch.zeros_like(self.sums.squares)

    @torch.no_grad()
    def add(self, weights: Weights, owners: Owners, phases: Phases) -> None:
        """Add a step's gradients, after they have been reduced; one rank adds each slice."""
        layer_of = {weights.names.get(name, name): k for name, k in self._layer_of.items()}
        own = _own_gradients(owners, self._world.rank)
        found = [(layer_of[name], gradient) for name, gradient in own if name in layer_of]
        if found:
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in found])).double()
            where = torch.tensor([k for k, _ in found], device=norms.device)
            # A step of fp16 that overflows is none.
            norms = norms.where(norms.isfinite().all(), 0.0)
            self._own.index_add_(0, where, norms.square())
        if self._is_common:
            phases.wait(self.reduce, name="gradient norms")
        self.sums = replace(self.sums, n_steps=self.sums.n_steps + 1)

    def reduce(self) -> None:
        """Exchange the squares that only their ranks know; all ranks must call it."""
        if self._world.size > 1:
            dist.all_reduce(self._own)
        self.sums = replace(self.sums, squares=self.sums.squares + self._own)
        self._own.zero_()

    def take(self) -> list[float]:
        """The root mean square, over the steps since the last call, of each layer's norm; all ranks
        must call it. 0 for layers that are not trained."""
        self.reduce()
        squares, n_steps = self.sums.squares, self.sums.n_steps
        found: list[float] = (squares / max(1, n_steps)).sqrt().tolist()
        self.sums = replace(self.sums, squares=torch.zeros_like(squares), n_steps=0)
        return found

    def state(self) -> FreezingState:
        """The state of all ranks, which must call it."""
        self.reduce()
        return self.sums.state()

    def note(self, since: int, interval: int, n_frozen: int) -> None:
        """Remember the last decision."""
        self.sums = replace(self.sums, decided=(since, interval, n_frozen))

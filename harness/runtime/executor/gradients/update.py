"""The update of weights, and before it the scale of fp16, hooks of parameters, and norms.

Norms are of all gradients, to clip them, and of each layer's, to freeze by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.domain.files import Count
from harness.domain.freezing import FreezableLayer, FreezingState
from harness.runtime.engines.engine import Clip
from harness.runtime.engines.phases import Phases
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.state.weights import Weights
from harness.runtime.ranks.world import World


class LossScaleState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `LossScale`."""

    factor: Annotated[float, msgspec.Meta(gt=0)]
    n_steps: Count


class LossScale:
    """The factor of the losses, in synchronous training; 1 for other dtypes than fp16."""

    def __init__(self, dtype: str, world: World) -> None:
        # FSDP's scaler of several ranks has an overflow of shape (1,), which fused AdamW refuses.
        self._scaler = torch.amp.GradScaler(world.device.type) if dtype == "fp16" else None
        self._device, self._is_alone = world.device, world.size == 1

    def factor(self) -> float:
        """The factor of this step's losses."""
        if self._scaler is None:
            return 1.0
        scaled: Tensor = self._scaler.scale(torch.ones((), device=self._device))
        return float(scaled)

    def state(self) -> LossScaleState | None:
        """The factor, and the steps since it changed; None for other dtypes."""
        if self._scaler is None:
            return None
        found = self._scaler.state_dict()
        return LossScaleState(factor=found["scale"], n_steps=found["_growth_tracker"])

    def load(self, state: LossScaleState | None) -> None:
        """Continue with the factor of a state, if it is of fp16 too."""
        if self._scaler is not None and state is not None:
            found = {"scale": state.factor, "_growth_tracker": state.n_steps}
            self._scaler.load_state_dict(self._scaler.state_dict() | found)

    def unscale(self, optimizer: torch.optim.Optimizer, *, is_muted: bool) -> None:
        """Divide the gradients by the factor; all ranks must call it."""
        if self._scaler is None or is_muted:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):  # a rank without weights takes part
            parameters[0].grad = torch.zeros_like(parameters[0])
        self._scaler.unscale_(optimizer)
        for found in self._scaler._found_inf_per_device(optimizer).values():
            if not self._is_alone:
                dist.all_reduce(found)

    def has_overflowed(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Whether any rank's gradients did, as `unscale` has found; None for other dtypes."""
        if self._scaler is None:
            return None
        found = self._scaler._found_inf_per_device(optimizer)
        return torch.stack([*found.values()]).any()

    def step(self, optimizer: torch.optim.Optimizer, *, is_muted: bool) -> None:
        """Update the weights, unless gradients overflowed."""
        if self._scaler is None or is_muted:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        self._scaler.update()


Hook = Callable[[Any], Any]


class ParameterHooks:
    """Removes the hooks of a model's parameters, and runs them when gradients are complete.

    Operators that use such a parameter are never cut along the parameter's dims.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, list[Hook]] = {}
        self._after: dict[str, list[Hook]] = {}
        for name, parameter in model.named_parameters():
            self._before[name] = _take_hooks(parameter._backward_hooks)
            self._after[name] = _take_hooks(parameter._post_accumulate_grad_hooks)

    def first(self) -> str | None:
        """The name of a parameter with a hook; None if there is none."""
        return next(
            (name for name in self._before if self._before[name] or self._after[name]), None
        )

    @torch.no_grad()
    def run(self, parameters: Mapping[WeightSlice, nn.Parameter]) -> None:
        """Run the hooks of each parameter; hooks that may replace the gradient come first."""
        for piece, parameter in parameters.items():
            if parameter.grad is None:
                continue
            for hook in self._before.get(piece.name, ()):
                replaced = hook(parameter.grad)
                if replaced is not None and replaced is not parameter.grad:
                    parameter.grad.copy_(replaced)  # in place, because buckets refer to it
            for hook in self._after.get(piece.name, ()):
                hook(parameter)


def _take_hooks(hooks: Any) -> list[Hook]:
    found = list(hooks.values()) if hooks else []
    if hooks:
        hooks.clear()
    return found


def _own_gradients(owners: Owners, rank: int) -> list[tuple[str, Tensor]]:
    """Parameter and gradient of each slice that this rank, of those that hold it, accounts for."""
    own = [(p.name, x.grad) for p, x in owners.own.items() if owners.of(p) == rank]
    return [(name, gradient) for name, gradient in own if gradient is not None]


class GradientClip(Clip):
    """See `Clip`; of synchronous training.

    Args:
        group: of the ranks of this rank's replica; None for a rank alone.
    """

    def __init__(self, most: float | None, world: World, group: Any) -> None:
        super().__init__(most)
        self._world, self._group = world, group

    @torch.no_grad()
    def apply(self, owners: Owners, phases: Phases, *, is_muted: bool) -> None:
        """Scale a step's gradients, after they have been reduced; all ranks must call it."""
        if self.most is None:
            return
        own = [gradient for _, gradient in _own_gradients(owners, self._world.rank)]
        square = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if own:
            square += torch.stack(torch._foreach_norm(own)).double().square().sum()
        if self._group is not None and not is_muted:
            phases.wait(lambda: dist.all_reduce(square, group=self._group), name="gradient norm")
        self.norm = square.sqrt()
        factor = (self.most / (self.norm + 1e-6)).clamp(max=1.0)
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
    def add(
        self, weights: Weights, owners: Owners, phases: Phases, has_overflowed: Tensor | None
    ) -> None:
        """Add a step's gradients, after they have been reduced; one rank adds each slice.

        Args:
            has_overflowed: see `LossScale`; a step in which any rank's gradients did is none.
        """
        layer_of = {weights.names.get(name, name): k for name, k in self._layer_of.items()}
        own = _own_gradients(owners, self._world.rank)
        found = [(layer_of[name], gradient) for name, gradient in own if name in layer_of]
        if found:
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in found])).double()
            where = torch.tensor([k for k, _ in found], device=norms.device)
            if has_overflowed is not None:
                norms = norms.where(~has_overflowed, 0.0)
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


class WeightUpdate:
    """Updates this rank's weights by their summed gradients."""

    def __init__(
        self,
        weights: Weights,
        owners: Owners,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        hooks: ParameterHooks,
        clip: GradientClip,
        phases: Phases,
    ) -> None:
        self._weights, self._owners, self._optimizer = weights, owners, optimizer
        self.scale, self._hooks, self.clip = scale, hooks, clip
        self._phases = phases

    def run(self, norms: LayerNorms | None, *, is_muted: bool) -> None:
        """Update and free the gradients; all ranks must call it.

        Args:
            norms: add up those of the gradients.
            is_muted: nothing is exchanged.
        """
        trained, phases = self._weights.trainable(), self._phases
        self.scale.unscale(self._optimizer, is_muted=is_muted)
        self._hooks.run(trained)
        if norms is not None and not is_muted:
            has_overflowed = self.scale.has_overflowed(self._optimizer)
            norms.add(self._weights, self._owners, phases, has_overflowed)
        phases.begin("optimizer")
        self.clip.apply(self._owners, phases, is_muted=is_muted)
        self.scale.step(self._optimizer, is_muted=is_muted)
        for parameter in (*trained.values(), *self._owners.own.values()):
            parameter.grad = None

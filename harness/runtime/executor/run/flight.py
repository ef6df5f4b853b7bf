"""Tensors of one microbatch on one device between its forward and its backward: with them the
random state, for a forward that is run twice, and the version of the weights, for pipelines that
update weights after every microbatch.

Weight stashing as in PipeDream (SOSP 2019, section 3.3): a microbatch's backward uses the weights
that its forward used, and its gradient is applied to the newest. On stage s of S a gradient is thus
S - 1 - s updates old, and less for the first microbatches after a flush.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from harness.domain.partition import Interval
from harness.runtime.data.batch import Batch
from harness.runtime.executor.program.program import DataKey, InputKey, TargetKey, WeightKey
from harness.runtime.executor.shards.regions import Region


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of the generators that a forward on a device uses."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


@contextlib.contextmanager
def repeated(state: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    """Use a saved state within the context; restore the current state on exit."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(state[0])
        if devices:
            torch.cuda.set_rng_state(state[1], device)
        yield


# A version of the weights: the tensor that replaces each parameter.
Version = dict[nn.Parameter, Tensor]


class Stash:
    """Copies the newest weights, so that updates do not change them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._newest: Version | None = None

    def newest(self) -> Version:
        """Copies of the current weights, shared until the next update."""
        if self._newest is None:
            self._newest = {p: p.detach().clone().requires_grad_() for p in self._parameters}
        return self._newest

    def move_gradients(self, version: Version) -> None:
        """Move a backward pass' gradients from a version to the parameters."""
        for parameter, copied in version.items():
            parameter.grad, copied.grad = copied.grad, None

    def updated(self) -> None:
        """Drop the newest version after a change of the weights."""
        self._newest = None


def call_with(
    module: fx.GraphModule, version: Version, inputs: Iterable[Tensor]
) -> tuple[Tensor, ...]:
    """Run a segment with a version of its weights."""
    # By the table of parameters, which a module shares with its shallow copies: of two names of one
    # entry, torch would restore the second to the stand-in of the first.
    tables = {id(owner._parameters): (path, owner) for path, owner in module.named_modules()}
    stand_ins = {
        f"{path}.{name}" if path else name: version[parameter]
        for path, owner in tables.values()
        for name, parameter in owner._parameters.items()
        if parameter in version
    }
    found: tuple[Tensor, ...] = functional_call(module, stand_ins, tuple(inputs), tie_weights=False)
    return found


@dataclass
class Flight:
    """One microbatch's tensors.

    Attributes:
        batch: this device's part of the microbatch; None if it reads no data.
        samples: interval of that part within the microbatch.
        weight: factor of the microbatch's summed loss.
        loss_share: weight of the microbatch's loss in the loss of the step.
        leaves: inputs of segments, detached from the graphs that computed them.
        outputs: outputs of each segment (stage, position), with their graphs.
        random: the generators' states before segments that are recomputed.
        version: the weights that its forward uses; None for the current weights.
        owned: leaves whose gradients share memory with no other tensor.
    """

    batch: Batch | None
    samples: Interval
    input_names: tuple[str, ...]
    weight: float = 1.0
    loss_share: float = 1.0
    leaves: dict[InputKey, Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    random: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    version: Version | None = None
    owned: set[InputKey] = field(default_factory=set)

    def input(self, key: InputKey) -> Tensor:
        if isinstance(key, DataKey):
            return self._data(key)
        if isinstance(key, TargetKey):
            assert self.batch is not None, "a device with a part of the loss reads data"
            start, stop = (at - self.samples[0] for at in key.samples)
            return self.batch.targets[start:stop]
        if isinstance(key, WeightKey):
            return torch.tensor(self.weight, dtype=torch.float64)
        return self.leaves[key]

    def _data(self, key: DataKey) -> Tensor:
        assert self.batch is not None, "a device that computes on inputs reads data"
        whole = self.batch.inputs[self.input_names.index(key.value)]
        (start, stop), *rest = key.block
        cut = whole[start - self.samples[0] : stop - self.samples[0]]
        for dim, (low, high) in enumerate(rest, start=1):
            if high - low != cut.shape[dim]:
                cut = cut.narrow(dim, low, high - low)
        return cut

    def gradient(self, key: InputKey) -> Tensor:
        """The gradient of a leaf; zeros if it has none yet."""
        leaf = self.leaves[key]
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
            self.owned.add(key)
        return leaf.grad

    def own_gradient(self, key: InputKey) -> None:
        """Give a leaf's gradient, if it has one, memory of its own before a change in place.

        Autograd may let gradients of several leaves, and that of an output, share memory.
        """
        leaf = self.leaves.get(key)
        if leaf is not None and leaf.grad is not None and key not in self.owned:
            leaf.grad = leaf.grad.clone()
            self.owned.add(key)

    def add_gradient(
        self, key: InputKey, region: Region, gradient: Tensor, *, is_own: bool = False
    ) -> None:
        """Add to the gradient of a region of a leaf; may keep one that shares no memory."""
        leaf = self.leaves[key]
        if leaf.grad is None and region.is_all and gradient.dtype == leaf.dtype:
            leaf.grad = gradient if is_own else gradient.clone()
            self.owned.add(key)
            return
        self.own_gradient(key)
        region.take(self.gradient(key)).add_(gradient)


@contextlib.contextmanager
def on_buffer_copies(module: fx.GraphModule) -> Iterator[None]:
    """Use copies of running statistics, so that recomputation does not update them twice."""
    tracked = [m._buffers for m in module.modules() if getattr(m, "track_running_stats", False)]
    kept = [dict(buffers) for buffers in tracked]
    for buffers in tracked:
        buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for buffers, originals in zip(tracked, kept, strict=True):
            buffers.update(originals)

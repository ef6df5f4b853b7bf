"""Versions of the weights, for pipelines that update weights after every microbatch.

Weight stashing as in PipeDream (SOSP 2019, section 3.3): a microbatch's backward uses the weights
that its forward used, and its gradient is applied to the newest. On stage s of S a gradient is thus
S - 1 - s updates old, and less for the first microbatches after a flush.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, fx, nn
from torch.func import functional_call

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
    stand_ins = {
        name: version[parameter]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter in version
    }
    found: tuple[Tensor, ...] = functional_call(module, stand_ins, tuple(inputs), tie_weights=False)
    return found

"""Data parallelism that averages parameters now and then, instead of gradients in each step.

The ranks of each host update a replica by themselves, or, on one host, each rank its own. A step
averages one of H fragments of the parameters while it computes, so each fragment is averaged every
H steps, every step sends as many bytes, and these are 1 / H of the gradients:

    begin    d = outer - local            all-reduce of the weighted d begins
    end      outer' = outer - step(d)     local += outer' - (local as it was at the beginning)

`outer` are the parameters that all ranks agree on, and `step` is that of SGD with learning rate and
Nesterov momentum. 1 and 0 make the mean of the replicas (local SGD; Stich, 2019), 0.7 and 0.9 are
DiLoCo (Douillard et al., 2023). Fragments, and an exchange beside one step of computing, are from
Streaming DiLoCo (Douillard et al., 2025), which mixes both parameters where this adds the
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from harness.errors import ModelError
from harness.runtime.devices.precision import reduced
from harness.runtime.engines.optimizers import OuterOptions


class _Piece(NamedTuple):
    """A part of a parameter's elements, in the order of its memory."""

    parameter: nn.Parameter
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor of the parameter's layout."""
        return _flat(tensor)[self.start : self.stop]


class _Exchange(NamedTuple):
    """The average of a fragment that is under way; `done.wait()` waits for the sum."""

    number: int
    start: Tensor
    sum: Tensor
    done: Any


class ReplicaAverage:
    """The outer parameters beside a rank's own; all ranks must make the same calls.

    Args:
        named: parameters by name; those that are not trained stay as they are.
        all_reduce: begins the sum of a tensor in place over all ranks, under a name and by a
            reduce_dtype; the result has a `wait`.
        reduce_dtype: of the differences that are summed, see `EngineOptions`.
        sizes: elements of all trained parameters of the replica, by name, of which this rank may
            have some; by default those of `named`.

    Attributes:
        n_begun: averages that have begun; gives the fragment of the next one.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        options: OuterOptions,
        all_reduce: Callable[[Tensor, str, str], Any],
        reduce_dtype: str,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        trained = {name: p for name, p in _dense(named) if p.requires_grad}
        self._trained = list(trained.values())
        sizes = sizes or {name: p.numel() for name, p in trained.items()}
        self._all_reduce, self._reduce_dtype = all_reduce, reduce_dtype
        self._pieces = list(_cut(trained, sizes, options.sync_every))
        fragments = {f"fragment{k}": nn.Parameter(_read(p)) for k, p in enumerate(self._pieces)}
        self.outer = nn.ParameterDict(fragments)
        momentum = options.momentum
        self._optimizer = SGD(
            self.outer.parameters(), options.learning_rate, momentum, nesterov=momentum > 0
        )
        self.n_begun = 0
        self._exchange: _Exchange | None = None

    @torch.no_grad()
    def begin(self, weight: float) -> None:
        """Begin to average the next fragment; the weights of all ranks must add up to 1."""
        number = self.n_begun % len(self._pieces)
        self.n_begun += 1
        start = _read(self._pieces[number])
        if not len(start):
            return
        summed = reduced((self._outer(number) - start) * weight, self._reduce_dtype)
        done = self._all_reduce(summed, f"fragment{number}", self._reduce_dtype)
        self._exchange = _Exchange(number, start, summed, done)

    def wait(self) -> None:
        """Wait until the average is there."""
        if self._exchange is not None:
            self._exchange.done.wait()

    @torch.no_grad()
    def update(self) -> None:
        """After `wait`, update the outer parameters by the average, and move the replica with
        them."""
        if self._exchange is None:  # the fragment is empty
            return
        (number, start, summed, _), self._exchange = self._exchange, None
        outer = self._outer(number)
        outer.grad = summed.to(outer.dtype)
        self._optimizer.step()
        outer.grad = None
        for piece, correction in _parts(self._pieces[number], outer - start):
            piece.of(piece.parameter).add_(correction)

    def _outer(self, number: int) -> nn.Parameter:
        outer: nn.Parameter = self.outer[f"fragment{number}"]
        return outer

    def whole(self) -> dict[Tensor, Tensor]:
        """The outer value of each trained parameter."""
        return self._whole(self._outer)

    def momentum(self) -> dict[Tensor, Tensor]:
        """The momentum of each trained parameter's outer value; empty without any."""
        state = self._optimizer.state
        buffers = [state[self._outer(k)].get("momentum_buffer") for k in range(len(self._pieces))]
        if not any(buffer is not None for buffer in buffers):
            return {}
        zeros = torch.zeros_like
        return self._whole(lambda k: zeros(self._outer(k)) if buffers[k] is None else buffers[k])

    @torch.no_grad()
    def _whole(self, fragment: Callable[[int], Tensor]) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {p: torch.empty_like(p) for p in self._trained}
        for number, pieces in enumerate(self._pieces):
            for piece, values in _parts(pieces, fragment(number)):
                piece.of(found[piece.parameter]).copy_(values)
        return found

    @torch.no_grad()
    def restart(self, momentum: Mapping[Tensor, Tensor], n_begun: int) -> None:
        """Take the rank's own parameters as the outer ones.

        Args:
            momentum: of some of them, as `momentum`; the others have none.
            n_begun: see above.
        """
        self.n_begun = n_begun
        self._optimizer.state.clear()
        for number, pieces in enumerate(self._pieces):
            outer = self._outer(number)
            outer.copy_(_read(pieces))
            parts = [p.of(momentum[p.parameter]) for p in pieces if p.parameter in momentum]
            if parts and sum(map(len, parts)) == len(outer):
                self._optimizer.state[outer]["momentum_buffer"] = torch.cat(parts).to(outer)


def _dense(named: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in named.items():
        if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
            raise ModelError(
                f"--sync-every averages the elements of {name} in the order of its memory, where "
                "some have one place: make the parameter with .contiguous()"
            )
        yield name, parameter


def _flat(parameter: Tensor) -> Tensor:
    """The elements in the order of memory, complex ones as pairs."""
    flat = parameter.detach().as_strided((parameter.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _cut(
    parameters: Mapping[str, nn.Parameter], sizes: Mapping[str, int], n_parts: int
) -> Iterator[list[_Piece]]:
    """Cut all elements into parts of equal size, or one element less; parts may be empty."""
    bounds = [sum(sizes.values()) * k // n_parts for k in range(n_parts + 1)]
    for low, high in pairwise(bounds):
        pieces, at = [], 0
        for name, size in sizes.items():
            start, stop = max(0, low - at), min(size, high - at)
            if start < stop and name in parameters:
                n_each = 2 if parameters[name].is_complex() else 1
                pieces.append(_Piece(parameters[name], start * n_each, stop * n_each))
            at += size
        yield pieces


def _read(pieces: list[_Piece]) -> Tensor:
    """Copy the elements of a fragment, 16 bits as fp32."""
    parts = [piece.of(piece.parameter) for piece in pieces]
    found = torch.cat(parts) if parts else torch.empty(0)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _parts(pieces: list[_Piece], fragment: Tensor) -> Iterator[tuple[_Piece, Tensor]]:
    """The elements of a fragment, by the piece that they belong to."""
    sizes = [piece.stop - piece.start for piece in pieces]
    yield from zip(pieces, fragment.split(sizes), strict=True)

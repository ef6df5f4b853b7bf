"""Buffers that forward writes, control flow by random numbers, outputs that are no tensor."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zoo.base import WIDTH, Net, ZooModel, named


class BufferAdded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x)) * (1 + self.seen)
        with torch.no_grad():
            self.seen += x.mean(0)
        return y


class BufferAssigned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(self.second(x - self.mean))


class BufferCopied(BufferAssigned):
    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.copy_(self.mean.lerp(x.detach().mean(0), 0.2))
        return torch.tanh(self.second(x)) + self.mean


class BufferCounted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.int64))

    def middle(self, x: Tensor) -> Tensor:
        self.n_calls.add_(1)
        return torch.tanh(self.second(x)) / self.n_calls


class BufferTwice(BufferAdded):
    """A module that writes a buffer, called twice."""

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(super().middle(x))


class AttributeCounted(Net):
    """A number of Python's that grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def middle(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return torch.tanh(self.second(x)) / self.n_calls


class LateChange(Net):
    """Computes otherwise after some steps, which it counts outside of its attributes."""

    def count(self) -> int:
        raise NotImplementedError

    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)
        return torch.tanh(y) if self.count() < 500 else torch.relu(y)


class ListCounted(LateChange):
    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def count(self) -> int:
        self.calls[0] += 1
        return self.calls[0]


class IteratorCounted(LateChange):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def count(self) -> int:
        return next(self.calls)


class ClosureCounted(LateChange):
    def __init__(self) -> None:
        super().__init__()
        n_calls = 0

        def count() -> int:
            nonlocal n_calls
            n_calls += 1
            return n_calls

        self.count = count


_n_calls = 0


class GlobalCounted(LateChange):
    def count(self) -> int:
        global _n_calls
        _n_calls += 1
        return _n_calls


class BufferRead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * self.scale


class TorchLayerDrop(Net):
    def middle(self, x: Tensor) -> Tensor:
        for _ in range(4):
            if self.training and torch.rand(()).item() < 0.5:
                continue
            x = x + torch.tanh(self.second(x))
        return x


class PythonLayerDrop(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.05 else torch.tanh(self.second(x))


class NumpyLayerDrop(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x if np.random.rand() < 0.05 else torch.tanh(self.second(x))


class Noise(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x) + 0.1 * torch.randn_like(x))


class BakedNoise(Net):
    """Drawn anew in each forward of the model, once when it is traced."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x) + 0.1 * torch.randn(WIDTH, dtype=x.dtype))


class IfValue(Net):
    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)
        if y.abs().max() > 1:
            y = y / 2
        return torch.tanh(y)


class DictOutput(Net):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "hidden": x}


class TupleOutput(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Outputs(NamedTuple):
    logits: Tensor
    hidden: Tensor


class NamedOutput(Net):
    def forward(self, x: Tensor) -> Any:
        return Outputs(super().forward(x), x)


class ListOutput(Net):
    def forward(self, x: Tensor) -> Any:
        return [super().forward(x)]


class LossInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class PerPixel(Net):
    """As many logits as a segmentation has: a label for each sample does not fit."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :, None, None].expand(-1, -1, 2, 2)


class OwnNorm(nn.Module):
    """A batch norm of the user's own, with running statistics."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(n))
        self.scale = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.mean(0)
            self.running.mul_(0.9).add_(0.1 * mean.detach())
        else:
            mean = self.running
        return (x - mean) * self.scale


class OwnNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnNorm(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.second(x)))


STATES: dict[str, ZooModel] = {
    **named(
        BufferAdded, BufferAssigned, BufferCopied, BufferCounted, BufferTwice, BufferRead,
        AttributeCounted, ListCounted, IteratorCounted, ClosureCounted, GlobalCounted, IfValue,
        DictOutput, TupleOutput, NamedOutput, ListOutput, LossInside, PerPixel,
    ),
    **named(TorchLayerDrop, PythonLayerDrop, NumpyLayerDrop, Noise, BakedNoise, is_random=True),
    "own_norm": ZooModel(build=OwnNormed),
}  # fmt: skip

"""Habits of users that graphs may lose: parametrizations, pruning, teachers, queues, state kept on
`self`, functions of torch.func, saved tensor hooks, global hooks, odd outputs."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint_sequential

from zoo.base import ZooModel
from zoo.libraries import LibraryModel

N_FEATURES, WIDTH, N_CLASSES = 8, 12, 5


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(N_FEATURES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, N_CLASSES),
        )

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(x))

    def forward(self, x: Tensor) -> Any:
        return self.c(self.middle(torch.tanh(self.a(x))))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.b, "weight", Symmetric())


class Orthogonal(Base):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.b)


class Pruned(Base):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.b, "weight", amount=0.4)


class Lora(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(x) + x @ self.down.T @ self.up.T * 0.5)


class Teacher(Base):
    """A momentum encoder that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.b).requires_grad_(False)

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.b.parameters(), self.teacher.parameters(), strict=True):
                theirs.mul_(0.9).add_(mine, alpha=0.1)
        return torch.tanh(self.b(x)) + self.teacher(x).detach()


class Queue(Base):
    """MoCo: the batch's keys enter a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(16, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.b(x))
        z = torch.softmax(y @ self.queue.T, 1) @ self.queue
        with torch.no_grad():
            self.queue = torch.cat([y.detach(), self.queue])[:16]
        return y + z


class Kept(Base):
    """The last batch's mean, kept as an attribute of `self`."""

    last: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.b(x))
        z = y if self.last is None else y + self.last
        self.last = y.mean(0).detach()
        return z


class Looked(Base):
    """Features that are kept to be looked at, and never read."""

    def middle(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.b(x))
        return self.features


class Caught(Base):
    """Features that a forward hook catches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self.a.register_forward_hook(lambda m, i, o: self.found.__setitem__("a", o))

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(x)) + self.found["a"]


class Warming(Base):
    """A factor that grows with a buffer of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
        return torch.tanh(self.b(x)) * torch.clamp(self.step / 4.0, max=1.0)


class WarmingItem(Warming):
    def middle(self, x: Tensor) -> Tensor:
        self.step += 1
        return torch.tanh(self.b(x)) * min(1.0, self.step.item() / 4)


class Counting(Base):
    """Something else after some steps, by a count on `self`."""

    n_steps = 0

    def middle(self, x: Tensor) -> Tensor:
        self.n_steps += 1
        return torch.tanh(self.b(x)) if self.n_steps < 50 else torch.relu(self.b(x))


class Whitened(Base):
    def middle(self, x: Tensor) -> Tensor:
        y = self.b(x)
        y = y - y.mean(dim=0, keepdim=True)
        covariance = y.t() @ y / y.shape[0] + torch.eye(WIDTH, dtype=y.dtype)
        return y @ torch.linalg.inv(covariance)


class Neighbours(Base):
    def middle(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(2, largest=False).indices
        return torch.tanh(self.b(x[near].mean(1)))


class BatchAttention(Base):
    """Samples taken for the sequence, by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2)

    def middle(self, x: Tensor) -> Tensor:
        return self.attend(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))[0].squeeze(1)


class Ghost(Base):
    def middle(self, x: Tensor) -> Tensor:
        parts = [F.layer_norm(p - p.mean(0), (WIDTH,)) for p in self.b(x).chunk(2)]
        return torch.cat(parts)


class VectorQuantized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(7, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        y = self.b(x)
        nearest = torch.cdist(y, self.codes.weight).argmin(1)
        z = self.codes(nearest)
        return y + (z - y).detach() + 0.1 * z


class Scripted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))


class Compiled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.DataParallel(Base())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Vmapped(Base):
    def middle(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: torch.tanh(self.b.weight @ row))(x)


class Functional(Base):
    def middle(self, x: Tensor) -> Tensor:
        half = {name: 0.5 * p for name, p in self.b.named_parameters()}
        return torch.func.functional_call(self.b, half, (x,)).tanh()


class Hyper(Base):
    """Weights that another layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(3)), nn.Linear(3, WIDTH * WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.maker(self.code).view(WIDTH, WIDTH)))


class TiedTranspose(Base):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(torch.tanh(self.b(x)), self.b.weight.t()))


class Saved(Base):
    """Saved tensors are packed on the way to backward."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t / 4):
            return torch.tanh(self.b(x))


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Linear(N_FEATURES, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, N_CLASSES),
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


class Talking(Base):
    """Asserts, warnings, a cache and a try."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def scale(self, n: int) -> float:
        return 1 / math.sqrt(n)

    def middle(self, x: Tensor) -> Tensor:
        assert x.dim() == 2, x.shape
        if x.shape[0] > 10**6:
            warnings.warn("a large batch", stacklevel=2)
        try:
            return torch.tanh(self.b(x)) * self.scale(x.shape[-1])
        except RuntimeError:
            return x


class FrozenNorm(Base):
    """A batch norm that is set to evaluate, as in detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.eval()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.b(x)))


class WithNone(Base):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Auxiliary(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return {"out": self.c(self.middle(h)), "aux": self.c(h)}


def vector() -> dict[str, Tensor]:
    return {"x": torch.randn(2, N_FEATURES)}


def habits(builds: dict[str, Any]) -> dict[str, ZooModel]:
    """Rows of the zoo, by their factories."""
    return {f"habit_{name}": LibraryModel(build=build, side=8) for name, build in builds.items()}


def habits_of(*kinds: type[nn.Module], example: Callable[[], Any] = vector) -> dict[str, ZooModel]:
    """The same by classes, whose models have one example."""
    return habits({kind.__name__.lower(): lambda kind=kind: (kind(), example()) for kind in kinds})


HABITS = habits_of(
    Counting, Parametrized, Orthogonal, Pruned,
    Lora, Teacher, Queue, Kept, Looked, Caught, Warming, WarmingItem, Whitened,
    Neighbours, BatchAttention, Ghost, VectorQuantized, Scripted, Compiled,
    Wrapped, Vmapped, Functional, Hyper, TiedTranspose, Saved, Segments, Talking, FrozenNorm,
    WithNone, Auxiliary,
)  # fmt: skip

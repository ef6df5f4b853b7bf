"""Habits of users that graphs may lose: parametrizations, pruning, teachers, queues, state kept on
`self`, functions of torch.func, saved tensor hooks, global hooks, odd outputs."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint_sequential

from zoo.base import ZooModel
from zoo.libraries import LibraryModel

_I, _D, _C = 8, 12, 5


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(_I, _D), nn.Linear(_D, _D), nn.Linear(_D, _C)

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
        self.down = nn.Parameter(torch.randn(2, _D) * 0.1)
        self.up = nn.Parameter(torch.randn(_D, 2) * 0.1)

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
        self.register_buffer("queue", torch.randn(16, _D))

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


class Standardized(Base):
    """Batch standardization by hand."""

    def middle(self, x: Tensor) -> Tensor:
        y = self.b(x)
        return (y - y.mean(0)) / (y.std(0) + 1e-3)


class Whitened(Base):
    def middle(self, x: Tensor) -> Tensor:
        y = self.b(x)
        y = y - y.mean(dim=0, keepdim=True)
        covariance = y.t() @ y / y.shape[0] + torch.eye(_D, dtype=y.dtype)
        return y @ torch.linalg.inv(covariance)


class Neighbours(Base):
    def middle(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(2, largest=False).indices
        return torch.tanh(self.b(x[near].mean(1)))


class Sorted(Base):
    def middle(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return torch.cumsum(self.b(x)[order], 0)[order.argsort()]


class BatchAttention(Base):
    """Samples taken for the sequence, by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(_D, 2)

    def middle(self, x: Tensor) -> Tensor:
        return self.attend(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))[0].squeeze(1)


class Ghost(Base):
    def middle(self, x: Tensor) -> Tensor:
        parts = [F.layer_norm(p - p.mean(0), (_D,)) for p in self.b(x).chunk(2)]
        return torch.cat(parts)


class Mixup(Base):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(0.7 * x + 0.3 * x.flip(0)))


class VectorQuantized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(7, _D)

    def middle(self, x: Tensor) -> Tensor:
        y = self.b(x)
        nearest = torch.cdist(y, self.codes.weight).argmin(1)
        z = self.codes(nearest)
        return y + (z - y).detach() + 0.1 * z


class Scripted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.script(nn.Sequential(nn.Linear(_D, _D), nn.ReLU()))


class Compiled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.compile(nn.Linear(_D, _D), backend="eager")


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
        self.code, self.maker = nn.Parameter(torch.randn(3)), nn.Linear(3, _D * _D)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.maker(self.code).view(_D, _D)))


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
        layers = [nn.Linear(_I, _D), nn.Tanh(), nn.Linear(_D, _D), nn.Tanh(), nn.Linear(_D, _C)]
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
        self.norm = nn.BatchNorm1d(_D)
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


class InTraining(Base):
    """A loss in training, logits in evaluation."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        if self.training:
            return {"loss": F.cross_entropy(logits, target, label_smoothing=0.1)}
        return logits


class Uncertain(Base):
    """Two losses with weights that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))
        self.value = nn.Linear(_D, 1)

    def forward(self, x: Tensor, target: Tensor, level: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        logits, value = self.c(self.middle(h)), self.value(h).squeeze(1)
        w = torch.exp(-self.log_variance)
        loss = w[0] * F.cross_entropy(logits, target) + w[1] * F.mse_loss(value, level)
        return {"loss": loss + self.log_variance.sum(), "logits": logits}


class Focal(Base):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        each = F.cross_entropy(logits, target, reduction="none")
        return {"loss": ((1 - torch.exp(-each)) ** 2 * each).mean(), "logits": logits}


class Contrastive(Base):
    """Pairs each sample with all others."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z, w = (F.normalize(Base.forward(self, v), dim=1) for v in (x, y))
        logits = z @ w.T / 0.1
        labels = torch.arange(len(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": z}


class Penalized(Base):
    """Weight decay in the loss."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return {"loss": F.cross_entropy(logits, target) + 1e-3 * penalty, "logits": logits}


class Summed(Base):
    """The sum over samples, no mean."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, target, reduction="sum"), "logits": logits}


class FakeQuantized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.fake = torch.ao.quantization.FakeQuantize()

    def middle(self, x: Tensor) -> Tensor:
        return self.fake(self.b(x).float()).to(x.dtype)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(_I, _D, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * _D, _C)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.shape[0],), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        _, h = self.gru(packed)
        return self.head(torch.cat([h[0], h[1]], 1))


class Stateful(nn.Module):
    """A GRU whose state goes on with the next batch."""

    h: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(_I, _D, batch_first=True), nn.Linear(_D, _C)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.gru(x, self.h)
        self.h = h.detach()
        return self.head(y[:, -1])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, _D, mode="mean"), nn.Linear(_D, _C)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


class FlatBag(Bag):
    """Offsets that forward makes of the batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        offsets = torch.arange(0, tokens.numel(), tokens.shape[1])
        return self.head(self.bag(tokens.flatten(), offsets))


class Pairwise(Base):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(_D, _D, _D)

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.b(x))
        return self.bilinear(x, y) * F.cosine_similarity(x, y).unsqueeze(1)


class StandardConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


def _standard_conv() -> Any:
    return nn.Sequential(
        StandardConv(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, _C),
    ), (torch.randn(2, 3, 8, 8),)  # fmt: skip


def _instance_norm() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, _C),
    ), (torch.randn(2, 3, 8, 8),)  # fmt: skip


class FunctionNorm(nn.Module):
    """An instance norm by a function, with statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, _C)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = F.instance_norm(self.conv(x), self.mean, self.var, use_input_stats=True)
        return self.head(y.abs().mean((2, 3)))


class MaxNorm(nn.Module):
    """An embedding whose forward shrinks its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, _D, max_norm=0.5), nn.Linear(_D, _C)
        with torch.no_grad():
            self.words.weight.mul_(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).mean(1))


def _extracted() -> Any:
    from torchvision.models.feature_extraction import create_feature_extractor

    net = nn.Sequential(nn.Linear(_I, _D), nn.Tanh(), nn.Linear(_D, _C), nn.Softmax(1))
    return create_feature_extractor(net, {"2": "logits"}), (torch.randn(2, _I),)


def _graph_module() -> Any:
    return torch.fx.symbolic_trace(Base()), _vector()


def _clamped(part: nn.Module, given: Any, taken: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.clamp(-0.01, 0.01) for gradient in given)


def _backward_hooks() -> Any:
    model = Base()
    for part in (model.a, model.b):
        part.register_full_backward_hook(_clamped)
    return model, _vector()


def _vector() -> dict[str, Tensor]:
    return {"x": torch.randn(2, _I)}


def _labels() -> dict[str, Tensor]:
    return {**_vector(), "target": torch.tensor([0, _C - 1])}


_PLAIN: tuple[type[nn.Module], ...] = (
    Counting, Parametrized, Orthogonal, Pruned, Lora, Teacher, Queue, Kept, Looked, Caught, Warming,
    WarmingItem, Standardized, Whitened, Neighbours, Sorted, BatchAttention, Ghost, Mixup,
    VectorQuantized, Scripted, Compiled, Wrapped, Vmapped, Functional, Hyper, TiedTranspose, Saved,
    Segments, Talking, FrozenNorm, WithNone, Auxiliary, Pairwise, FakeQuantized,
)  # fmt: skip
_BUILDS: dict[str, Any] = {
    **{kind.__name__.lower(): lambda kind=kind: (kind(), _vector()) for kind in _PLAIN},
    "in_training": lambda: (InTraining(), _labels()),
    "uncertain": lambda: (Uncertain(), {**_labels(), "level": torch.tensor([0.5, 2.0])}),
    "focal": lambda: (Focal(), _labels()),
    "contrastive": lambda: (Contrastive(), {**_vector(), "y": torch.randn(2, _I)}),
    "penalized": lambda: (Penalized(), _labels()),
    "summed": lambda: (Summed(), _labels()),
    "packed": lambda: (Packed(), {"x": torch.randn(2, 4, _I)}),
    "stateful": lambda: (Stateful(), {"x": torch.randn(2, 4, _I)}),
    "bag": lambda: (Bag(), {"tokens": torch.arange(8).view(2, 4) * 2}),
    "max_norm": lambda: (MaxNorm(), {"tokens": torch.arange(8).view(2, 4)}),
    "flat_bag": lambda: (FlatBag(), {"tokens": torch.arange(8).view(2, 4) * 2}),
    "standard_conv": _standard_conv,
    "instance_norm": _instance_norm,
    "function_norm": lambda: (FunctionNorm(), (torch.randn(2, 3, 8, 8),)),
    "extracted": _extracted,
    "graph_module": _graph_module,
    "backward_hooks": _backward_hooks,
}
HABITS: dict[str, ZooModel] = {
    f"habit_{name}": LibraryModel(build=build, side=8) for name, build in _BUILDS.items()
}

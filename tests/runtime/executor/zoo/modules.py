"""Modules with statistics, states or a capture of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.base import ZooModel
from zoo.habits import N_CLASSES, N_FEATURES, WIDTH, Base, habits, habits_of, vector


class EvalInForward(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def middle(self, x: Tensor) -> Tensor:
        self.drop.eval()
        return self.drop(torch.tanh(self.b(x)))


class Unregistered(Base):
    """Parameters in a list of Python's, which no optimizer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.full((WIDTH,), 0.5), torch.full((WIDTH,), 2.0)]

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(x * self.scales[0].to(x.dtype))) * self.scales[1].to(x.dtype)


class CountingInDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"n": 0}

    def middle(self, x: Tensor) -> Tensor:
        self.state["n"] += 1
        return torch.tanh(self.b(x)) if self.state["n"] < 50 else torch.relu(self.b(x))


class FakeQuantized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.fake = torch.ao.quantization.FakeQuantize()

    def middle(self, x: Tensor) -> Tensor:
        return self.fake(self.b(x).float()).to(x.dtype)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(N_FEATURES, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, N_CLASSES)

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
        self.gru, self.head = (
            nn.GRU(N_FEATURES, WIDTH, batch_first=True),
            nn.Linear(WIDTH, N_CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.gru(x, self.h)
        self.h = h.detach()
        return self.head(y[:, -1])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, WIDTH, mode="mean"), nn.Linear(WIDTH, N_CLASSES)

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
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

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
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, N_CLASSES),
    ), (torch.randn(2, 3, 8, 8),)  # fmt: skip


def _instance_norm() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, N_CLASSES),
    ), (torch.randn(2, 3, 8, 8),)  # fmt: skip


class FunctionNorm(nn.Module):
    """An instance norm by a function, with statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, N_CLASSES)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = F.instance_norm(self.conv(x), self.mean, self.var, use_input_stats=True)
        return self.head(y.abs().mean((2, 3)))


class MaxNorm(nn.Module):
    """An embedding whose forward shrinks its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, WIDTH, max_norm=0.5), nn.Linear(WIDTH, N_CLASSES)
        with torch.no_grad():
            self.words.weight.mul_(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).mean(1))


def _extracted() -> Any:
    from torchvision.models.feature_extraction import create_feature_extractor

    net = nn.Sequential(
        nn.Linear(N_FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, N_CLASSES), nn.Softmax(1)
    )
    return create_feature_extractor(net, {"2": "logits"}), (torch.randn(2, N_FEATURES),)


def _graph_module() -> Any:
    return torch.fx.symbolic_trace(Base()), vector()


def _clamped(part: nn.Module, given: Any, taken: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.clamp(-0.01, 0.01) for gradient in given)


def _backward_hooks() -> Any:
    model = Base()
    for part in (model.a, model.b):
        part.register_full_backward_hook(_clamped)
    return model, vector()


MODULES: dict[str, ZooModel] = habits_of(
    EvalInForward, Unregistered, CountingInDict, Pairwise, FakeQuantized
) | habits(
    {
        "packed": lambda: (Packed(), {"x": torch.randn(2, 4, N_FEATURES)}),
        "stateful": lambda: (Stateful(), {"x": torch.randn(2, 4, N_FEATURES)}),
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
)

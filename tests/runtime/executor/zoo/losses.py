"""Losses that models compute themselves, of their outputs and labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.base import ZooModel
from zoo.habits import N_CLASSES, N_FEATURES, WIDTH, Base, habits, habits_of, vector


class InTraining(Base):
    """A loss in training, logits in evaluation."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        if self.training:
            return {"loss": F.cross_entropy(logits, target, label_smoothing=0.1)}
        return logits


class Alone(Base):
    """Nothing but the loss."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(super().forward(x), target)


class Uncertain(Base):
    """Two losses with weights that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))
        self.value = nn.Linear(WIDTH, 1)

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


class Weighted(Base):
    """Weights of the classes: the mean is over their sum."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        weight = torch.arange(1.0, N_CLASSES + 1, dtype=logits.dtype, device=logits.device)
        return {"loss": F.cross_entropy(logits, target, weight=weight), "logits": logits}


class Likelihood(Base):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        log_p = F.log_softmax(super().forward(x), -1)
        return {"loss": F.nll_loss(log_p, target), "logits": log_p}


class Distilled(Base):
    """A frozen teacher, of which the student learns."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(N_FEATURES, N_CLASSES).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / 2, -1)
        distance = F.kl_div(F.log_softmax(logits / 2, -1), soft, reduction="batchmean")
        loss = F.cross_entropy(logits, target) + 4 * distance
        return {"loss": loss, "logits": logits, "soft": soft}


class Dice(Base):
    """An overlap over the whole batch."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = super().forward(x)
        p, y = F.softmax(logits, -1), F.one_hot(target, N_CLASSES).to(logits.dtype)
        return {"loss": 1 - 2 * (p * y).sum() / (p.sum() + y.sum()), "logits": logits}


class Sparse(Base):
    """A penalty of activations beside the loss."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        logits = self.c(self.middle(h))
        loss = F.cross_entropy(logits, target) + 0.1 * h.abs().mean()
        return {"loss": loss, "logits": logits, "hidden": h}


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


def _labels() -> dict[str, Tensor]:
    return {**vector(), "target": torch.tensor([0, N_CLASSES - 1])}


LOSSES: dict[str, ZooModel] = habits_of(
    Alone, Focal, Weighted, Likelihood, Distilled, Dice, Sparse, Penalized, Summed,
    example=_labels,
) | habits({
    "in_training": lambda: (InTraining(), _labels()),
    "uncertain": lambda: (Uncertain(), {**_labels(), "level": torch.tensor([0.5, 2.0])}),
})  # fmt: skip

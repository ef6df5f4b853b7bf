"""What one line of the zoo is, and the parts that its models share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.runtime.models.task import InputSpec, Task

N_CLASSES = 6
WIDTH = 12
VECTOR = (10,)
IMAGE = (3, 8, 8)
TOKENS = (8,)
VOCABULARY = 11


class Net(nn.Module):
    """A first, a second and a last linear layer; `middle` is what each model does its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(*VECTOR, WIDTH), nn.Tanh())
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, N_CLASSES)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A model with one construct.

    Attributes:
        build: makes the model; its parameters are drawn anew.
        without: the same model without the construct, where that is a dtype of 16 bits: such models
            are judged by how one device rounds.
        has_norm: statistics are those of a microbatch, on one device too.
        is_random: draws numbers, of which no two strategies draw the same.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = VECTOR
    without: Callable[[], nn.Module] | None = None
    has_norm: bool = False
    is_random: bool = False

    def task(self, *, seed: int = 0, has_construct: bool = True) -> Task:
        """The model with its weights; equal in every process. In float64, but for those whose
        construct is a narrower dtype."""
        torch.manual_seed(seed)
        build = self.build if has_construct or self.without is None else self.without
        model, is_narrow = build(), self.without is not None
        spec = InputSpec(name="x", shape=self.shape)
        if self.shape == TOKENS:
            spec = replace(spec, dtype=torch.int64, n_values=VOCABULARY)
        elif not is_narrow:
            spec = replace(spec, dtype=torch.float64)
        model = model if is_narrow else model.double()
        return Task(model=model, inputs=(spec,), n_classes=N_CLASSES)


def named(*kinds: type[nn.Module], **options: Any) -> dict[str, ZooModel]:
    """Rows of the zoo, named as their classes; `options` are those of `ZooModel`."""
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): ZooModel(build=kind, **options)
        for kind in kinds
    }

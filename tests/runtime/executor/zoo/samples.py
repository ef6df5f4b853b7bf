"""Operators that mix the samples of a batch, and sizes of batches that models write down."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.base import N_CLASSES, Net, ZooModel, named

Mix = Callable[[Tensor], Tensor]


def _mixing(mix: Mix) -> Callable[[], nn.Module]:
    """A net whose middle mixes samples by a function."""

    class Mixing(Net):
        def middle(self, x: Tensor) -> Tensor:
            return torch.tanh(mix(self.second(x)))

    return Mixing


def _standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()


def _attended(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.t(), dim=-1) @ x


def _half_detached(x: Tensor) -> Tensor:
    """Only the second half of a batch is trained, as where it has no labels."""
    n = x.shape[0] // 2
    return torch.cat([x[:n].detach(), x[n:]])


def _in_thirds(x: Tensor) -> Tensor:
    """A third of an odd batch is no third of each of its parts."""
    return torch.cat([(k + 1) * part for k, part in enumerate(torch.tensor_split(x, 3))])


def _contrasted(x: Tensor) -> Tensor:
    unit = F.normalize(x, dim=1)
    similar = torch.einsum("id,jd->ij", unit, unit)
    return x * similar.mean(1, keepdim=True)


def _shuffled(x: Tensor) -> Tensor:
    return x + x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)]


def _transposed(x: Tensor) -> Tensor:
    """Elements of other samples by a view alone."""
    return x + x.reshape(x.shape[1], -1).t()


def _batch_normed(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def _shifted(x: Tensor) -> Tensor:
    return torch.cat([x[1:], x[:1]], dim=0) + x


class LoopOverBatch(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(self.second(one)) for one in x])


class HardBatch(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x.view(8, 12)))


class GuardedBatch(Net):
    def middle(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            return torch.tanh(self.second(x))
        return torch.tanh(self.second(x)) * 0.5


class GuardedOne(Net):
    def middle(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            x = x.contiguous()
        return torch.tanh(self.second(x))


class TimeFolded(Net):
    """Frames folded into the batch, and apart again."""

    def middle(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(1).expand(-1, 3, -1).reshape(x.shape[0] * 3, x.shape[1])
        return torch.tanh(self.second(rows)).view(-1, 3, x.shape[1]).mean(1)


class PlacedFeatures(Net):
    """Features in the places of some tokens, as where a language model reads images, and a lookup
    of each sample's positions, as in the masks of language models."""

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x))
        rows = torch.arange(x.shape[0], device=x.device)
        turned = y[rows[:, None], torch.arange(x.shape[1] - 1, -1, -1, device=x.device)[None]]
        features = torch.cat(list(turned[:, 8:]), dim=0)
        return y.masked_scatter(x.argsort(1) < 4, features)


class DoubledRows(Net):
    """Logits have twice as many rows as the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), super().forward(-x)], dim=0)


class RowsOfSteps(Net):
    """Logits of each of three steps, as rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1).expand(-1, 3, -1).reshape(-1, N_CLASSES)


SAMPLES: dict[str, ZooModel] = {
    "softmax_over_batch": ZooModel(build=_mixing(lambda x: torch.softmax(x, dim=0))),
    "roll_batch": ZooModel(build=_mixing(lambda x: x + torch.roll(x, 1, 0))),
    "flip_batch": ZooModel(build=_mixing(lambda x: x + x.flip(0))),
    "mixup": ZooModel(build=_mixing(lambda x: 0.7 * x + 0.3 * torch.flip(x, dims=[0]))),
    "cumsum_batch": ZooModel(build=_mixing(lambda x: torch.cumsum(x, dim=0))),
    "counted_batch": ZooModel(build=_mixing(lambda x: x * (x > 0).long().cumsum(0))),
    "sort_batch": ZooModel(build=_mixing(lambda x: x.sort(dim=0).values)),
    "centred_batch": ZooModel(build=_mixing(lambda x: x - x.mean(0, keepdim=True))),
    "mean_of_all": ZooModel(build=_mixing(lambda x: x - x.mean())),
    "largest_of_batch": ZooModel(build=_mixing(lambda x: x / x.abs().amax(dim=0))),
    "standardised_batch": ZooModel(build=_mixing(_standardised)),
    "functional_batch_norm": ZooModel(build=_mixing(_batch_normed), has_norm=True),
    "attended_batch": ZooModel(build=_mixing(_attended)),
    "half_detached": ZooModel(build=_mixing(_half_detached)),
    "thirds_of_batch": ZooModel(build=_mixing(_in_thirds)),
    "contrasted_batch": ZooModel(build=_mixing(_contrasted)),
    "shuffled_batch": ZooModel(build=_mixing(_shuffled)),
    "shifted_batch": ZooModel(build=_mixing(_shifted)),
    "transposed_batch": ZooModel(build=_mixing(_transposed)),
    "scaled_by_batch": ZooModel(build=_mixing(lambda x: x * (x.shape[0] / 8))),
    **named(
        LoopOverBatch, HardBatch, GuardedBatch, GuardedOne, TimeFolded, PlacedFeatures,
        DoubledRows, RowsOfSteps,
    ),
}  # fmt: skip

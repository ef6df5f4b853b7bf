"""Small models for `equivalence_models`: of operators that share memory, give several values or
scalars; of stages and copies that bring the orders of messages and of readers apart; of norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_CLASSES = 6
_WIDTH = 12
_NARROW = 4
WIDE = 512


class _Net(nn.Module):
    """Three linear layers of one width, joined by what a subclass's `between` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.first(x)))

    def between(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class ChangedUnderAnotherName(_Net):
    def between(self, y: Tensor) -> Tensor:
        same = y
        y = F.relu_(y)
        z = self.second(y)
        z.add_(same).mul_(0.5)
        return z


class ChangedInPlaces(_Net):
    def between(self, y: Tensor) -> Tensor:
        y[:, :4] += 1.0
        y[:, 4:8] = y[:, 8:12] * 2
        y[:, -1] = 0
        return self.second(y) + y


class HandsOnItsState(_Net):
    """The state of a recurrent layer is an output, and another layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LSTM(3, 5, 2, batch_first=True), nn.LSTM(5, 5, 2, batch_first=True)
        self.cell = nn.GRUCell(5, _WIDTH)

    def between(self, y: Tensor) -> Tensor:
        steps, state = self.one(y.view(-1, 4, 3))
        _, (hidden, cells) = self.two(steps, state)
        last, first = hidden.unbind(0)
        start = torch.zeros(y.shape[0], _WIDTH, device=y.device, dtype=y.dtype)
        return self.cell(last * first + cells.sum(0), start)


class SeveralOutputs(_Net):
    """Indices, masks and strided parts of several outputs, some of which nobody reads."""

    def between(self, y: Tensor) -> Tensor:
        a, b, _ = y.split([5, 4, 3], 1)
        best, where = y.topk(3, 1)
        most, at = y.max(1)
        mask = y > 0
        z = self.second(torch.where(mask, y, -y))
        picked = z.gather(1, where) * best
        joined = torch.cat([a[:, ::2], b, picked, most.unsqueeze(1), at.unsqueeze(1) * 0.1], 1)
        return z + joined.masked_fill(~mask, 0.1)


class Scalars(_Net):
    """Parameters without dims, and what is computed of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gate = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.3))

    def between(self, y: Tensor) -> Tensor:
        mixed = torch.lerp(y, self.second(y), torch.sigmoid(self.gate))
        return mixed * self.scale.exp() + self.gate


class ManyDims(_Net):
    """Windows, as values of six dims, samples not always the first, some of two rows a sample."""

    def between(self, y: Tensor) -> Tensor:
        y = y.view(-1, 1, 1, 1, 3, 2).mT.flip(5).reshape(y.shape)
        windows = y.view(-1, 2, 1, 3, 1, 2).permute(1, 0, 2, 4, 3, 5)
        one, two = windows.unbind(0)
        return self.second(torch.cat([one.flatten(1), two.flatten(1).tanh()], 1))


class SharedNorm(_Net):
    """One batch norm after each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_WIDTH)

    def between(self, y: Tensor) -> Tensor:
        return self.norm(self.second(self.norm(y).tanh()))


class SpectralNorm(_Net):
    """A weight divided by its largest singular value, which buffers estimate step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.utils.parametrizations.spectral_norm(self.second)

    def between(self, y: Tensor) -> Tensor:
        return self.second(y).tanh()


class FixedBatch(_Net):
    """The batch size is written out."""

    def between(self, y: Tensor) -> Tensor:
        return self.second(y.view(8, 3, 4).transpose(1, 2).reshape(8, _WIDTH))


class Branches(nn.Module):
    """Three functions of one value, the first and the last of which are read together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(_NARROW, _NARROW)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, second, third = x.relu(), x.tanh(), x.sigmoid()
        return (first + third) * second


class ReadAhead(nn.Module):
    """Two values, of which the first is read by an early operator of a late stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(_NARROW, _NARROW)

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        second = first.tanh()
        ahead = first.relu()
        both = second.sigmoid() * first
        return ahead + both.cos()


class WideHead(nn.Module):
    """The last weights fill a bucket, which starts before the norm's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDE, 1)
        self.norm = nn.BatchNorm2d(WIDE)
        self.head = nn.Conv2d(WIDE, WIDE, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x))).mean(dim=(2, 3))


class UnreadRow(nn.Module):
    """Of the norm's 7 rows the pool reads 6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.norm(self.stem(x))).flatten(1))


class Branching(nn.Module):
    """A convolution and what works in place on its output, behind a branch on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(2, 2, 3), nn.ReLU(inplace=True)
        self.classify = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 0:
            x = self.conv(x)
        x += 1
        x = x + self.relu(x)  # of which both are the changed one
        found: Tensor = self.classify(x.flatten(1))
        return found


class ChangedCopy(nn.Module):
    """A copy of a region, changed in place, which is a view where the region is all of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(6, _WIDTH)
        self.third = nn.Linear(6, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        region = self.first(x).unflatten(1, (2, 4))[:, :, 1:]
        changed = region.flatten(1).mul_(3)
        found: Tensor = self.second(changed) + self.third(region.flatten(1))
        return found


def normed_input() -> nn.Module:
    """The first operator reads all samples of a batch."""
    return nn.Sequential(nn.BatchNorm1d(_NARROW), nn.Linear(_NARROW, _NARROW))


def towers() -> nn.Module:
    """Two pairs of a wide and a narrow layer, which follow one another without anything between."""
    return nn.Sequential(
        nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 8),
        nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 5),
    )  # fmt: skip


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "changed_under_another_name": ChangedUnderAnotherName,
    "changed_in_places": ChangedInPlaces,
    "changed_copy": ChangedCopy,
    "hands_on_its_state": HandsOnItsState,
    "several_outputs": SeveralOutputs,
    "scalars": Scalars,
    "many_dims": ManyDims,
    "shared_norm": SharedNorm,
    "spectral_norm": SpectralNorm,
    "fixed_batch": FixedBatch,
}
# With the shape of a sample and the number of classes.
SHAPED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "branches": (Branches, (_NARROW,), _NARROW),
    "read_ahead": (ReadAhead, (_NARROW,), _NARROW),
    "wide_head": (WideHead, (3, 2, 2), WIDE),
    "unread_row": (UnreadRow, (3, 7, 7), 5),
    "normed_input": (normed_input, (_NARROW,), _NARROW),
    "branching": (Branching, (2, 5, 5), 3),
    "towers": (towers, (7,), 5),
}

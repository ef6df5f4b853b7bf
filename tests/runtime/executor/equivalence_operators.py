"""Small models whose operators share memory, give several values, or scalars, for
`equivalence_models`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_CLASSES = 6
_WIDTH = 12


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
    """Windows, as values of six dims, samples not always the first."""

    def between(self, y: Tensor) -> Tensor:
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


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "changed_under_another_name": ChangedUnderAnotherName,
    "changed_in_places": ChangedInPlaces,
    "hands_on_its_state": HandsOnItsState,
    "several_outputs": SeveralOutputs,
    "scalars": Scalars,
    "many_dims": ManyDims,
    "shared_norm": SharedNorm,
    "spectral_norm": SpectralNorm,
    "fixed_batch": FixedBatch,
}

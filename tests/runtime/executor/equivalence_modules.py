"""Small modules with constructs that torchvision's models lack, for `equivalence_models`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

N_CLASSES = 6


class TinyLstm(nn.Module):
    """Two layers, the last time step classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x)
        return self.head(self.norm(outputs[:, -1]))


class TimeFirstLstm(nn.Module):
    """As PyTorch's LSTM is by default: inside, the first dim is time, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(5, 6)
        self.lstm = nn.LSTM(6, 8)
        self.head = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.inward(x).permute(1, 0, 2))
        return self.head(torch.tanh(outputs[-1]))


class Branchy(nn.Module):
    """Branches, functions, a free parameter, a grouped convolution, a module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.left = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.right = nn.Conv2d(6, 6, 1)
        self.norm = nn.BatchNorm2d(12)
        self.scale = nn.Parameter(torch.ones(1, 12, 1, 1))
        self.shared = nn.Linear(12, 12)
        self.head = nn.Linear(18, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        left, right = F.gelu(self.left(x)), torch.tanh(self.right(x))
        both = self.norm(torch.cat([left, right], dim=1)) * self.scale
        mean = F.max_pool2d(both, 3, stride=2, padding=1).mean(dim=(2, 3))
        once = F.relu(self.shared(mean))
        twice = self.shared(once) + mean
        a, b = twice.chunk(2, dim=1)
        gate = torch.softmax(once, dim=1)
        return self.head(torch.cat([gate * twice, a * b.sigmoid()], dim=1))


class Tokens(nn.Module):
    """Embedded tokens through linear layers over a sequence, the decoder tied to the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.back = nn.Linear(10, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.back(F.silu(self.norm(self.hidden(self.embedding(tokens)))))
        return self.decoder(x).mean(dim=1)


class MergedRows(nn.Module):
    """Steps of all samples as rows of one matrix, and apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 8)
        self.head = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.gelu(self.hidden(x.reshape(-1, 5)))
        return self.head(rows.reshape(-1, 7, 8).mean(dim=1))


class Perceptron(nn.Module):
    """Linear layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.4),
            nn.Linear(16, 12), nn.Tanh(), nn.Dropout(0.2),
            nn.Linear(12, N_CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TrackedNorms(nn.Module):
    """Norms of several kinds that keep running statistics, one of which normalises by them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Tanh(),
            nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3),
            nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(12, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class NormedWeights(nn.Module):
    """Weights that are computed from others, by a parametrization and by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            weight_norm(nn.Linear(10, 16)), nn.Tanh(),
            nn.utils.weight_norm(nn.Linear(16, 12)), nn.Tanh(),
            nn.Linear(12, N_CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Disordered(nn.Module):
    """Parts are used in another order than they are defined in, one never; a weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, N_CLASSES)
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.tied(torch.relu(self.first(x)))) * self.scale
        return self.head(self.last(x))


class Exported(nn.Module):
    """What torch.fx cannot trace, out of order too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, N_CLASSES)
        self.never = nn.Linear(3, 3)
        self.body = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([2 * column for column in x.unbind(1)], dim=1) + torch.tensor([1, 2] * 3)
        x = self.dropout(torch.relu(self.norm(self.body(x))))
        return self.head(x.reshape(x.shape[0], -1))

"""Small models for `equivalence_models`, with constructs that programs do not draw or that once
trained wrong: weights that are viewed, shared, complex or computed, norms, convolutions, tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_N_CLASSES, _WIDTH = 6, 8
_STEPS = (7, 5)
_TOKENS, N_TOKENS = (5,), 11
_SMALL_IMAGE = (3, 9, 7)


class _Steps(nn.Module):
    """Steps of 5 features to 6 classes, by what a subclass's `between` computes of 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.second = nn.Linear(5, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.inward(x)).mean(1))

    def between(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class StepsFirst(_Steps):
    """Layers over steps first, samples second."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.third = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def between(self, y: Tensor) -> Tensor:
        z = y.permute(1, 0, 2)
        z = self.norm(z + torch.tanh(self.second(z)))
        return F.gelu(self.third(z)).transpose(0, 1)


class MadeWeights(_Steps):
    """Weights that a layer makes of a parameter, without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seed, self.maker = nn.Parameter(torch.randn(3)), nn.Linear(3, _WIDTH * _WIDTH)

    def between(self, y: Tensor) -> Tensor:
        weight = torch.tanh(self.maker(self.seed)).view(_WIDTH, _WIDTH)
        return F.linear(y, weight) + self.second(y)


class ComplexLayers(_Steps):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(_WIDTH, _WIDTH, dtype=torch.complex128)
        self.two = nn.Linear(_WIDTH, _WIDTH, dtype=torch.complex128)

    def between(self, y: Tensor) -> Tensor:
        z = self.one(torch.complex(y, self.second(y)))
        z = self.two(z / (1 + z.abs()))
        return z.real * z.imag


class Conjugates(_Steps):
    """Complex values that are conjugated, and real ones that are negated, when they are read."""

    def between(self, y: Tensor) -> Tensor:
        z = torch.complex(y, self.second(y))
        turned = z.conj()
        negated = turned.imag
        return (turned * z.flip(2)).imag + torch.tanh(negated)


class CalledByName(_Steps):
    """Arguments by name, among them one that a function changes in place."""

    def between(self, y: Tensor) -> Tensor:
        z = self.second(input=y)
        w = torch.tanh(input=z)
        return F.relu(input=z, inplace=True) * w


class NamedAlike(_Steps):
    """Names that differ by a dot or a number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.second_weight, self.last = nn.Parameter(torch.randn(_WIDTH, _WIDTH)), nn.Tanh()
        self.act, self.act_0, self.act_1 = nn.SiLU(), nn.Sigmoid(), nn.ReLU()

    def between(self, y: Tensor) -> Tensor:
        y = F.linear(y, self.second.weight) @ self.second_weight
        return self.last(self.second(self.act_1(self.act(y)) - self.act_0(y)))


class SharedBlock(_Steps):
    """One block of two layers, three times, as ALBERT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 12), nn.Linear(12, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)

    def between(self, y: Tensor) -> Tensor:
        for _ in range(3):
            y = self.norm(y + self.down(F.gelu(self.up(y))))
        return self.second(y)


class WeightViews(_Steps):
    """Parameters that are expanded, sliced, transposed, added up and detached."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = (
            nn.Parameter(torch.randn(1, 1, _WIDTH)), nn.Parameter(torch.randn(9, _WIDTH)),
        )  # fmt: skip
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.second.weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH).t())

    def between(self, y: Tensor) -> Tensor:
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], dim=1) + self.positions[:8]
        y = torch.tanh(y @ self.second.weight.t()) + self.second.weight.detach()
        return self.second(y) * (self.left.view(-1) + self.right.view(-1))


class Angles(_Steps):
    """Angles of the data, which must not be rounded before their cosine is taken."""

    def forward(self, x: Tensor) -> Tensor:
        angles = 100 * x[:, :, :1]
        return self.head((self.second(self.inward(x)) * torch.cos(angles)).mean(1))


class Slope(nn.Module):
    """The gradient of a layer's output with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, y: Tensor) -> Tensor:
        y = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(y).tanh().sum(), y, create_graph=True)
        return slope


class Slopes(_Steps):
    """A module that differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = Slope()

    def between(self, y: Tensor) -> Tensor:
        return self.second(y) + self.slope(y)


class AsManyAsSamples(nn.Module):
    """As many steps and layers as a microbatch has samples: all dims of a state are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.lstm = nn.Linear(5, 3), nn.LSTM(3, 3, num_layers=2, batch_first=True)
        self.head = nn.Linear(3, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steps, (hidden, _) = self.lstm(torch.tanh(self.inward(x)))
        return self.head(steps[:, -1] + hidden[0] * hidden[1])


class Norms(nn.Module):
    """Batch norms with a mean of all batches, without weights, without statistics; others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 1),
        )  # fmt: skip
        self.mean_of_all = nn.BatchNorm2d(4, momentum=None)
        self.plain = nn.BatchNorm2d(6, affine=False)
        self.untracked = nn.BatchNorm2d(4, track_running_stats=False)
        self.groups, self.last = nn.GroupNorm(2, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.plain(self.two(torch.relu(self.mean_of_all(self.one(x))))))
        y = self.groups(self.untracked(self.three(y)))
        return self.head(self.last(y.flatten(2)).mean(2))


class Convolutions(nn.Module):
    """Strides, dilation, groups and paddings of all kinds; pools that end in half a window."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 6, (3, 2), padding="same", dilation=(1, 2))
        self.deep = nn.Conv2d(6, 6, 3, padding=(2, 1), groups=6)
        self.mirrored = nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect", stride=(1, 2))
        self.pool = nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False)
        self.most = nn.MaxPool2d(2, ceil_mode=True)
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2)
        self.along = nn.Conv1d(4, 5, 3)
        self.head = nn.Linear(5, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.most(torch.tanh(self.deep(F.gelu(self.same(x)))))
        y = self.up(self.pool(self.mirrored(y)))
        return self.head(self.along(F.interpolate(y, scale_factor=2.0).flatten(2)).amax(2))


class UnreadBlock(nn.Module):
    """Of 7 rows of a convolution the pool reads 6."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(36, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.two(torch.tanh(self.one(x)))).flatten(1))


class Filled(nn.Module):
    """Tables whose padding is the last row, whose rows are normed, and that look up in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N_TOKENS, _WIDTH, padding_idx=N_TOKENS - 1)
        self.bag = nn.EmbeddingBag(N_TOKENS, _WIDTH, mode="mean", padding_idx=0)
        self.most = nn.EmbeddingBag(N_TOKENS, _WIDTH, mode="max")
        self.head = nn.Linear(_WIDTH, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.table(x)).mean(1)
        return self.head(y + self.bag(x) * self.most(x))


class ByFrequency(nn.Module):
    """Gradients of rows over their number in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N_TOKENS, _WIDTH, scale_grad_by_freq=True)
        self.head = nn.Linear(_WIDTH, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)).mean(1))


class NormedRows(ByFrequency):
    """Rows that a lookup makes shorter in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N_TOKENS, _WIDTH, max_norm=1.0)


class Positions(nn.Module):
    """Learned positions, a learned query and a table of words that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(N_TOKENS, _WIDTH), nn.Embedding(9, _WIDTH)
        self.question, self.query = nn.Parameter(torch.randn(3, _WIDTH)), nn.Linear(_WIDTH, _WIDTH)
        self.second, self.head = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, N_TOKENS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        scores = F.gelu(self.query(self.question.tanh())) @ self.second(y).transpose(1, 2)
        return self.head((scores.softmax(-1) @ y).mean(1))


class SparseRows(ByFrequency):
    """Gradients of the rows that were looked up alone, which optimizers refuse to decay."""

    is_sparse = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N_TOKENS, _WIDTH, sparse=self.is_sparse)
        self.rows = nn.Parameter(torch.randn(N_TOKENS, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = F.embedding(x, self.rows, sparse=self.is_sparse)
        return super().forward(x) + self.head(y.mean(1))


class DenseRows(SparseRows):
    is_sparse = False


# With the shape of a sample; samples of one dim are tokens.
CONSTRUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "steps_first": (StepsFirst, _STEPS),
    "made_weights": (MadeWeights, _STEPS),
    "complex_layers": (ComplexLayers, _STEPS),
    "conjugates": (Conjugates, _STEPS),
    "called_by_name": (CalledByName, _STEPS),
    "named_alike": (NamedAlike, _STEPS),
    "shared_block": (SharedBlock, _STEPS),
    "weight_views": (WeightViews, _STEPS),
    "angles": (Angles, _STEPS),
    "slopes": (Slopes, _STEPS),
    "as_many_as_samples": (AsManyAsSamples, (2, 5)),
    "unread_block": (UnreadBlock, (3, 7, 7)),
    "norms": (Norms, _SMALL_IMAGE),
    "convolutions": (Convolutions, _SMALL_IMAGE),
    "filled": (Filled, _TOKENS),
    "positions": (Positions, _TOKENS),
    "by_frequency": (ByFrequency, _TOKENS),
    "normed_rows": (NormedRows, _TOKENS),
    "dense_rows": (DenseRows, _TOKENS),
    "sparse_rows": (SparseRows, _TOKENS),
}

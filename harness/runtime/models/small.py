"""Small models after papers: LeNet-5 for images, a network that translates, and DLRM.

LeNet-5 with ReLU and max pooling, for images of 28 x 28 or 32 x 32: LeCun et al., Gradient-Based
Learning Applied to Document Recognition, 1998, section II.B. The translator is a stack of LSTMs
with attention after the decoder: Luong et al., Effective Approaches to Attention-based Neural
Machine Translation, 2015; Wu et al., "GNMT", 2016 (stacks with residuals). DLRM has a bottom MLP
for dense features, tables for categories, and a top MLP on both: Naumov et al., Deep Learning
Recommendation Model for Personalization and Recommendation Systems, 2019; interaction `cat` is that
of FlexFlow's DLRM, `dot` that of the paper.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from harness.errors import ModelError
from harness.runtime.models.attention import GroupedAttention
from harness.runtime.models.task import PADDING, DlrmOptions, ModelOptions


class LeNet(nn.Module):
    """Two convolutions, three linear layers; 28 x 28 images are padded to the paper's 32 x 32."""

    def __init__(self, n_classes: int, n_channels: int, image_size: int) -> None:
        super().__init__()
        padding = 2 if image_size < 32 else 0
        side = ((image_size + 2 * padding - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(n_channels, 6, kernel_size=5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, n_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, channels, size, size) to logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


class LstmStack(nn.Module):
    """LSTM layers, each a module of its own, so that a pipeline can cut between them; with
    residuals from the second on."""

    def __init__(self, width: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(n_layers)
        )
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, length, width) to the last layer's outputs, of the same shape."""
        for number, (layer, dropout) in enumerate(zip(self.layers, self.dropouts, strict=True)):
            y = dropout(layer(x)[0])
            x = x + y if number else y
        return x


class Nmt(nn.Module):
    """Called with source and target tokens (n, length), the target shifted right.

    Source padding is masked in the attention. The decoder starts from a state of zeros.
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        sizes = options.text
        self.source_tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.target_tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.encoder = LstmStack(sizes.width, sizes.n_layers, 0.2)
        self.decoder = LstmStack(sizes.width, sizes.n_layers, 0.2)
        self.attention = GroupedAttention(
            sizes.width, sizes.n_heads, n_groups=sizes.n_groups, has_bias=False
        )
        self.combine = nn.Linear(2 * sizes.width, sizes.width, bias=False)
        self.activation = nn.Tanh()
        self.output = nn.Linear(sizes.width, sizes.vocabulary_size, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source_tokens(source))
        x = self.decoder(self.target_tokens(target))
        context = self.attention(x, memory, source.ne(PADDING))
        combined = self.activation(self.combine(torch.cat((context, x), dim=2)))
        logits: Tensor = self.output(combined)
        return logits


def interaction_width(options: DlrmOptions) -> int:
    """Number of input features of the top MLP."""
    n_vectors, width = len(options.table_rows) + 1, options.bottom_mlp[-1]
    if options.interaction == "cat":
        return n_vectors * width
    return width + n_vectors * (n_vectors - 1) // 2


def check_dlrm(options: DlrmOptions) -> None:
    """Refuse MLPs that do not fit each other.

    Raises:
        ModelError: names the widths that disagree.
    """
    if len(options.bottom_mlp) < 2 or len(options.top_mlp) < 2 or not options.table_rows:
        raise ModelError(
            f"dlrm needs two MLPs of at least two widths and a table, not {options.bottom_mlp}, "
            f"{options.top_mlp} and {len(options.table_rows)} tables"
        )
    width = interaction_width(options)
    if options.top_mlp[0] != width:
        raise ModelError(
            f"dlrm's top MLP starts with {options.top_mlp[0]}, but {len(options.table_rows)} "
            f"tables of width {options.bottom_mlp[-1]} interact by {options.interaction} to "
            f"{width}: start --dlrm-top-mlp with {width}"
        )
    if options.top_mlp[-1] != 1:
        raise ModelError(
            f"dlrm's top MLP ends with {options.top_mlp[-1]} outputs, its loss needs one logit: "
            "end --dlrm-top-mlp with 1"
        )


def _mlp(widths: tuple[int, ...], *, is_last_linear: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if is_last_linear else layers))


class Dlrm(nn.Module):
    """Called with dense (n, features) floats and indices (n, tables x lookups) integers."""

    def __init__(self, options: DlrmOptions) -> None:
        super().__init__()
        check_dlrm(options)
        self.options = options
        width = options.bottom_mlp[-1]
        self.bottom = _mlp(options.bottom_mlp, is_last_linear=False)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for rows in options.table_rows
        )
        self.top = _mlp(options.top_mlp, is_last_linear=True)
        for table, rows in zip(self.tables, options.table_rows, strict=True):
            bound = 1 / math.sqrt(rows)  # as in the paper's code
            nn.init.uniform_(table.weight, -bound, bound)  # type: ignore[arg-type]

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """Return logits (n, 1)."""
        vectors = [self.bottom(dense)]
        n = self.options.n_lookups
        # torch.fx can trace slices, but not split.
        vectors += [table(indices[:, i * n : (i + 1) * n]) for i, table in enumerate(self.tables)]
        logits: Tensor = self.top(self._interact(vectors))
        return logits

    def _interact(self, vectors: list[Tensor]) -> Tensor:
        if self.options.interaction == "cat":
            return torch.cat(vectors, dim=1)
        stacked = torch.stack(vectors, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        n = len(vectors)
        rows, columns = torch.tril_indices(n, n, offset=-1, device=products.device)
        return torch.cat([vectors[0], products[:, rows, columns]], dim=1)

"""DLRM: a bottom MLP for dense features, tables for categories, and a top MLP on both.

Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems,
2019. Interaction `cat` is that of FlexFlow's DLRM, `dot` that of the paper.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from harness.errors import ModelError
from harness.runtime.models.task import DlrmOptions


def interaction_width(options: DlrmOptions) -> int:
    """Number of input features of the top MLP."""
    n_vectors, width = len(options.table_rows) + 1, options.bottom_mlp[-1]
    if options.interaction == "cat":
        return n_vectors * width
    return width + n_vectors * (n_vectors - 1) // 2


def check_dlrm(options: DlrmOptions) -> None:
    """Refuse MLPs that do not fit each other."""
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

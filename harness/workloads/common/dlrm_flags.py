"""Flags for `--model dlrm` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.runtime.models import DlrmOptions
from harness.workloads.common.number_flags import check_at_least

_AT_LEAST = {
    "dlrm_bottom_mlp": 1,
    "dlrm_top_mlp": 1,
    "dlrm_table_rows": 1,
    "dlrm_lookups": 1,
}


@dataclass(frozen=True, kw_only=True)
class DlrmFlags:
    """Sizes of dlrm."""

    dlrm_bottom_mlp: tuple[int, ...] = (64, 512, 512, 64)
    """dlrm: layer widths of the bottom MLP; the first is the number of dense features, the last the
    width of the embeddings."""
    dlrm_top_mlp: tuple[int, ...] = (576, 1024, 1024, 1024, 1)
    """dlrm: layer widths of the top MLP, from the interaction's output to one logit."""
    dlrm_table_rows: tuple[int, ...] = (10_000,) * 8
    """dlrm: rows of each embedding table, one number per table."""
    dlrm_lookups: int = 1
    """dlrm: indices that a sample looks up (and sums) in each table."""
    dlrm_interaction: Literal["cat", "dot"] = "cat"
    """dlrm: how the vectors are combined: concatenated (cat), or by pairwise dot products (dot)."""

    def check_dlrm(self) -> None:
        """Refuse sizes below 1.

        Raises:
            ConfigError: names the flag.
        """
        check_at_least(self, _AT_LEAST)

    def dlrm_options(self) -> DlrmOptions:
        return DlrmOptions(
            bottom_mlp=self.dlrm_bottom_mlp,
            top_mlp=self.dlrm_top_mlp,
            table_rows=self.dlrm_table_rows,
            n_lookups=self.dlrm_lookups,
            interaction=self.dlrm_interaction,
        )

"""Flags for models of text only: bert_base, gpt2, llama, t5 and nmt."""

from __future__ import annotations

from dataclasses import dataclass

from harness.runtime.models import HeadName, TextOptions
from harness.workloads.common.number_flags import check_at_least

_SIZES = (
    "sequence_length",
    "vocabulary_size",
    "n_layers",
    "width",
    "n_heads",
    "n_groups",
    "mlp_width",
)


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """Sizes of a model of text."""

    sequence_length: int | None = None
    """text: tokens of a sample (t5, nmt: of source and of target each). Default: the model's."""
    vocabulary_size: int | None = None
    """text: number of tokens. Default: that of the vocabulary file, else the model's."""
    n_layers: int | None = None
    """text: layers (t5, nmt: of encoder and of decoder each)."""
    width: int | None = None
    """text: features of a token between layers."""
    n_heads: int | None = None
    """text: heads of an attention."""
    n_groups: int | None = None
    """text: heads of keys and values, each shared by n_heads / n_groups heads of queries."""
    mlp_width: int | None = None
    """text: features inside an MLP."""
    head: HeadName | None = None
    """text: prediction of bert_base: classes, span (of an answer) or tokens. Default: the data's,
    else classes."""

    def check_text(self) -> None:
        """Refuse sizes below 1.

        Raises:
            ConfigError: names the flag.
        """
        check_at_least(self, dict.fromkeys(_SIZES, 1))

    def text_options(self) -> TextOptions:
        sizes = {name: getattr(self, name) or 0 for name in _SIZES}
        return TextOptions(**sizes, head=self.head)


def fitted_text(text: TextOptions) -> dict[str, int | str | None]:
    """Flags of a text model's sizes."""
    return {name: getattr(text, name) or None for name in (*_SIZES, "head")}

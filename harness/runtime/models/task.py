"""What can be trained: a model, what it is fed, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from harness.errors import ModelError
from harness.runtime.models.outputs import choose_logits, named_outputs

LossName = Literal["cross_entropy", "binary_cross_entropy"]


def _sum_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets, reduction="sum")


def _sum_binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        outputs.float().reshape(-1), targets.float().reshape(-1), reduction="sum"
    )


LOSSES: dict[LossName, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _sum_cross_entropy,
    "binary_cross_entropy": _sum_binary_cross_entropy,
}


def logits_of(output: Any) -> Tensor:
    """The tensor that the loss takes of what a model returned.

    Raises:
        ModelError: there are several, or none, and none has a name for logits.
    """
    if isinstance(output, Tensor):
        return output
    chosen = choose_logits(named_outputs(output), type(output).__name__)
    if not isinstance(chosen, Tensor):
        raise ModelError(f"the model returns logits that are a {type(chosen).__name__}: a tensor")
    return chosen


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """One tensor that a model is fed: its shape without the sample dim.

    Attributes:
        n_values: for integers, one more than the largest; None for floats.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    n_values: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its inputs and its loss.

    Attributes:
        model: called with one tensor per entry of `inputs`, each (samples, *shape).
        n_classes: targets are integers below it; 0 for binary targets (floats 0 or 1).
    """

    model: nn.Module
    inputs: tuple[InputSpec, ...]
    loss: LossName = "cross_entropy"
    n_classes: int = 0

    def sum_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Loss summed over the samples: whoever knows the global batch divides by it.

        Args:
            outputs: the logits, or what has them under a name of theirs (`outputs.py`).

        Raises:
            ModelError: the loss cannot tell the logits from other outputs.
        """
        return LOSSES[self.loss](logits_of(outputs), targets)


@dataclass(frozen=True, kw_only=True)
class DlrmOptions:
    """Shape of a DLRM: MLPs as their layer widths, tables by their rows.

    Attributes:
        bottom_mlp: from the dense features to the embedding's width.
        top_mlp: from the interaction's width to one logit.
        table_rows: rows of each table; its length is the number of tables.
        n_lookups: indices per table and sample, summed.
    """

    bottom_mlp: tuple[int, ...] = (64, 512, 512, 64)
    top_mlp: tuple[int, ...] = (576, 1024, 1024, 1024, 1)
    table_rows: tuple[int, ...] = (10_000,) * 8
    n_lookups: int = 1
    interaction: Literal["cat", "dot"] = "cat"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is chosen of a model, apart from its name.

    Attributes:
        n_classes, n_channels, image_size: 0 takes the model's own, or the data's.
        dropout: probability everywhere in the model; None keeps the model's own.
        has_frozen_norms: batch normalisation is by running statistics, which stay as they are.
    """

    n_classes: int = 0
    n_channels: int = 0
    image_size: int = 0
    dropout: float | None = None
    has_frozen_norms: bool = False
    dlrm: DlrmOptions = field(default_factory=DlrmOptions)


def check_weights(model: nn.Module) -> None:
    """Refuse weights that have no shape yet.

    Raises:
        ModelError: names the lazy module.
    """
    for path, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(is_lazy, own)):
            raise ModelError(
                f"module {path!r} ({type(module).__name__}) has no weights before its first batch: "
                "call the model on a batch where it is made, or give the module its sizes"
            )

"""The flags that define the model, shared by profile, search and train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from harness.errors import ConfigError
from harness.runtime.models import ModelOptions
from harness.workloads.common.dlrm_flags import DlrmFlags
from harness.workloads.common.number_flags import check_at_least, flag
from harness.workloads.common.text_flags import TextFlags, fitted_text

_AT_LEAST = {"image_size": 1, "n_classes": 1}


@dataclass(frozen=True, kw_only=True)
class ModelFlags(DlrmFlags, TextFlags):
    """A model's name and its options."""

    model: str = "resnet18"
    """lenet, alexnet, vgg16, resnet18, resnet50, resnet101, resnet152, inception_v3, densenet121,
    vit_b_16, dlrm, bert_base, gpt2, llama, t5, nmt, or your own as package.module:factory (a
    function that returns an nn.Module over images)."""
    image_size: int | None = None
    """Height and width of the images in pixels. Default: that of the data set if the model accepts
    it, else the model's (224). Small images, such as 64, suit CPUs."""
    n_classes: int | None = None
    """Number of classes. Default: that of the data set, else the model's."""
    dropout: float | None = None
    """Probability of every dropout layer. Default: the model's."""
    batch_norm: Literal["local", "global", "frozen"] = "local"
    """Statistics of batch norm. local: each rank uses its own samples, as DDP does, so results
    differ from one device's. global: all samples of a microbatch (the torch engine needs GPUs for
    it, because it uses SyncBatchNorm). frozen: running statistics, not updated."""

    def check(self) -> None:
        """Refuse numbers that no model accepts.

        Raises:
            ConfigError: names the flag.
        """
        self.check_dlrm()
        self.check_text()
        check_at_least(self, _AT_LEAST)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(
                f"--dropout {self.dropout} is a probability: give 0 or more, and below 1"
            )

    def given_options(self) -> ModelOptions:
        """Options as given; `fit_options` fills the missing ones in from the model and the data."""
        return ModelOptions(
            n_classes=self.n_classes or 0,
            image_size=self.image_size or 0,
            dropout=self.dropout,
            has_frozen_norms=self.batch_norm == "frozen",
            dlrm=self.dlrm_options(),
            text=self.text_options(),
        )

    @property
    def norm_scope(self) -> Literal["local", "global"]:
        """Samples that batch statistics are computed over; without effect if they are frozen."""
        return "global" if self.batch_norm == "global" else "local"


def fitted_flags(fitted: ModelOptions) -> dict[str, Any]:
    """Flags of a model after `fit_options` filled in the missing ones, so that runs of equal models
    have equal configurations."""
    return {
        "image_size": fitted.image_size or None,
        "n_classes": fitted.n_classes or None,
        "n_channels": fitted.n_channels or None,
        **fitted_text(fitted.text),
    }


def shared_flags(source: Any, kind: type) -> dict[str, Any]:
    """Values of the fields of `source` that the dataclass `kind` has too, by name."""
    names = {field.name for field in fields(kind)}
    return {f.name: getattr(source, f.name) for f in fields(source) if f.name in names}


def flag_words(config: Mapping[str, Any], names: Iterable[str], defaults: Any) -> list[str]:
    """Command-line words for the model, and for those flags that differ from their defaults."""
    words: list[str] = []
    for name in names:
        given, default = _as_tuple(config[name]), _as_tuple(getattr(defaults, name))
        if given != default or name == "model":
            words += [flag(name), *map(str, given)]
    return words


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)

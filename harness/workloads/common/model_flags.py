"""The flags that say what is trained: every workload that builds a model has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from harness.errors import ConfigError
from harness.runtime.models import ModelOptions
from harness.workloads.common.dlrm_flags import DlrmFlags
from harness.workloads.common.number_flags import check_at_least, flag

_AT_LEAST = {"image_size": 1, "n_classes": 1}


@dataclass(frozen=True, kw_only=True)
class ModelFlags(DlrmFlags):
    """A model by its name, and what it is built with."""

    model: str = "resnet18"
    """lenet, alexnet, vgg16, resnet18, resnet50, resnet152, vit_b_16, dlrm, or your own as
    package.module:factory (a function that returns an nn.Module over images)."""
    image_size: int | None = None
    """Side of the images; by default the data's where the model takes it, else the model's own
    (224). Small ones, such as 64, suit CPUs."""
    n_classes: int | None = None
    """Classes to tell apart; by default the data's, else the model's own."""
    dropout: float | None = None
    """Probability of every dropout layer; by default the model's own."""
    batch_norm: Literal["local", "global", "frozen"] = "local"
    """local: each rank normalises by its own samples, as DDP does, which is not what one device
    trains; global: over all samples of a microbatch (on torch SyncBatchNorm, which needs GPUs; the
    executor does it anywhere); frozen: by running statistics."""

    def check(self) -> None:
        """Refuse numbers that make no sense for any model.

        Raises:
            ConfigError: names the flag.
        """
        self.check_dlrm()
        check_at_least(self, _AT_LEAST)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(
                f"--dropout {self.dropout} is a probability: give 0 or more, and below 1"
            )

    def asked_options(self) -> ModelOptions:
        """What the model is asked to be built with; the model and the data have their say."""
        return ModelOptions(
            n_classes=self.n_classes or 0,
            image_size=self.image_size or 0,
            dropout=self.dropout,
            has_frozen_norms=self.batch_norm == "frozen",
            dlrm=self.dlrm_options(),
        )

    @property
    def norm_scope(self) -> Literal["local", "global"]:
        """Whose samples a block is normalised with; frozen statistics are of no samples."""
        return "global" if self.batch_norm == "global" else "local"


def fitted_flags(fitted: ModelOptions) -> dict[str, Any]:
    """Flags with what was left to the model and the data filled in, so that runs of equal models
    have equal configurations."""
    return {
        "image_size": fitted.image_size or None,
        "n_classes": fitted.n_classes or None,
        "n_channels": fitted.n_channels or None,
    }


def shared_flags(source: Any, kind: type) -> dict[str, Any]:
    """The values of all fields of one dataclass that another kind has under the same name."""
    names = {field.name for field in fields(kind)}
    return {f.name: getattr(source, f.name) for f in fields(source) if f.name in names}


def flag_words(config: Mapping[str, Any], names: Iterable[str], defaults: Any) -> list[str]:
    """A command line's words for the model, and for those flags that are not at their defaults."""
    words: list[str] = []
    for name in names:
        given, default = _as_tuple(config[name]), _as_tuple(getattr(defaults, name))
        if given != default or name == "model":
            words += [flag(name), *map(str, given)]
    return words


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)

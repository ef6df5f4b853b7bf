"""The MODELS table, and models from a user's factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.errors import ModelError
from harness.runtime.models.dlrm import Dlrm, check_dlrm
from harness.runtime.models.factory import task_from_factory
from harness.runtime.models.lenet import LeNet
from harness.runtime.models.task import DlrmOptions, InputSpec, ModelOptions, Task
from harness.runtime.models.torchvision_import import import_torchvision

__all__ = [
    "MODELS",
    "DlrmOptions",
    "InputSpec",
    "ModelEntry",
    "ModelOptions",
    "Task",
    "build_task",
    "fit_options",
    "may_import_torchvision",
]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One row of MODELS.

    Attributes:
        build: makes the module from options that `fit_options` has filled in.
        image_size: default height and width of images; 0 if the model takes none.
        min_image_size: smallest height and width that its layers accept.
        size_multiple: height and width must be a multiple of this.
    """

    build: Callable[[ModelOptions], nn.Module]
    image_size: int = 224
    min_image_size: int = 32
    size_multiple: int = 1
    n_channels: int = 3
    n_classes: int = 1000


def _torchvision(name: str, options: ModelOptions, **fixed: Any) -> nn.Module:
    """Build a torchvision model with random weights, without downloads."""
    factory = getattr(import_torchvision("models"), name)
    model: nn.Module = factory(weights=None, num_classes=options.n_classes, **fixed)
    if options.n_channels != 3:
        raise ModelError(
            f"{name} takes images of 3 channels, the data has {options.n_channels}: "
            "use lenet or a factory of your own"
        )
    return model


def _vit_b_16(options: ModelOptions) -> nn.Module:
    return _torchvision("vit_b_16", options, image_size=options.image_size)


def _lenet(options: ModelOptions) -> nn.Module:
    return LeNet(options.n_classes, options.n_channels, options.image_size)


def _dlrm(options: ModelOptions) -> nn.Module:
    return Dlrm(options.dlrm)


MODELS: dict[str, ModelEntry] = {
    "lenet": ModelEntry(build=_lenet, image_size=28, min_image_size=28, n_channels=1, n_classes=10),
    "alexnet": ModelEntry(build=partial(_torchvision, "alexnet"), min_image_size=63),
    "vgg16": ModelEntry(build=partial(_torchvision, "vgg16")),
    "resnet18": ModelEntry(build=partial(_torchvision, "resnet18")),
    "resnet50": ModelEntry(build=partial(_torchvision, "resnet50")),
    "resnet152": ModelEntry(build=partial(_torchvision, "resnet152")),
    "vit_b_16": ModelEntry(build=_vit_b_16, min_image_size=16, size_multiple=16),
    "dlrm": ModelEntry(build=_dlrm, image_size=0, n_channels=0),
}


def entry_of(name: str) -> ModelEntry | None:
    """Look up a model in the table; None for a user's factory.

    Raises:
        ModelError: the name is in neither form.
    """
    if name in MODELS or ":" in name:
        return MODELS.get(name)
    raise ModelError(
        f"there is no model {name!r}: choose one of {', '.join(MODELS)}, or give "
        "--model package.module:factory"
    )


def may_import_torchvision(name: str) -> bool:
    """Whether building the model may import torchvision."""
    return name not in ("lenet", "dlrm")


def fit_options(
    name: str, options: ModelOptions, data_image_size: int = 0, data_channels: int = 0
) -> ModelOptions:
    """Fill in missing classes, channels and image size from the data, else from the model.

    Raises:
        ModelError: the model is unknown or does not accept the image size.
    """
    entry = entry_of(name) or ModelEntry(build=_no_build, min_image_size=1)
    if name == "dlrm":
        check_dlrm(options.dlrm)
        return options
    size = options.image_size
    if not size:
        size = entry.image_size
        if data_image_size and _takes(entry, data_image_size):
            size = data_image_size
    elif not _takes(entry, size):
        raise ModelError(
            f"{name} cannot take images of {size} x {size}: use --image-size of at least "
            f"{entry.min_image_size}, a multiple of {entry.size_multiple}"
        )
    n_channels = options.n_channels or data_channels or entry.n_channels
    n_classes = options.n_classes or entry.n_classes
    return replace(options, image_size=size, n_channels=n_channels, n_classes=n_classes)


def _no_build(options: ModelOptions) -> nn.Module:
    raise AssertionError("task_from_factory calls a user's factory")


def _takes(entry: ModelEntry, size: int) -> bool:
    return size >= entry.min_image_size and size % entry.size_multiple == 0


def _set_dropout(model: nn.Module, probability: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = probability


def _freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def _inputs(name: str, options: ModelOptions) -> tuple[InputSpec, ...]:
    if name != "dlrm":
        side = options.image_size
        return (InputSpec(name="images", shape=(options.n_channels, side, side)),)
    dlrm = options.dlrm
    return (
        InputSpec(name="dense", shape=(dlrm.bottom_mlp[0],)),
        InputSpec(
            name="indices",
            shape=(len(dlrm.table_rows) * dlrm.n_lookups,),
            dtype=torch.int64,
            n_values=min(dlrm.table_rows),
        ),
    )


def build_task(name: str, options: ModelOptions, seed: int = 0) -> Task:
    """Build a model on the current default device, with random weights from `seed`.

    Args:
        options: as `fit_options` returns them.

    Raises:
        ModelError: the model is unknown or does not accept the options.
    """
    torch.manual_seed(seed)
    entry = entry_of(name)
    if entry is None:
        task = task_from_factory(name, options)
    else:
        task = Task(
            model=entry.build(options),
            inputs=_inputs(name, options),
            loss="binary_cross_entropy" if name == "dlrm" else "cross_entropy",
            n_classes=0 if name == "dlrm" else options.n_classes,
        )
    if options.dropout is not None:
        _set_dropout(task.model, options.dropout)
    if options.has_frozen_norms:
        _freeze_norms(task.model)
    return task

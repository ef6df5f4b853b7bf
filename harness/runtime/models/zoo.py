"""MODELS: how each named model becomes a Task; a user's factory becomes one the same way."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from harness.errors import HarnessError, ModelError
from harness.runtime.models.dlrm import Dlrm, dlrm_batch
from harness.runtime.models.lenet import LeNet
from harness.runtime.models.task import Batch, ModelOptions, Task, image_batch
from harness.runtime.models.vision import torchvision


def _cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _click_loss_sum(logits: Tensor, clicks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, clicks, reduction="sum")


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _image_task(model: nn.Module, options: ModelOptions, n_channels: int = 3) -> Task:
    shape = (n_channels, options.image_size, options.image_size)
    kept = model if options.dropout else _without_dropout(model)
    synthesize = functools.partial(image_batch, shape=shape, n_classes=options.n_classes)
    return Task(kept, _cross_entropy_sum, synthesize)


def _lenet(options: ModelOptions) -> Task:
    if options.image_size < 16:
        raise ModelError(
            f"lenet's two convolutions and poolings leave nothing of {options.image_size} pixels: "
            "set --image-size to 16 or more"
        )
    return _image_task(LeNet(options.n_classes, options.image_size), options, n_channels=1)


def _vision(name: str, options: ModelOptions) -> Task:
    factory = getattr(torchvision().models, name)
    extra: dict[str, Any] = {"image_size": options.image_size} if name.startswith("vit") else {}
    try:
        model = factory(weights=None, num_classes=options.n_classes, **extra)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ModelError(f"{name} for images of {options.image_size} pixels: {error}") from None
    return _image_task(model, options)


def _dlrm(options: ModelOptions) -> Task:
    synthesize = functools.partial(dlrm_batch, options=options.dlrm)
    return Task(Dlrm(options.dlrm), _click_loss_sum, synthesize)


_VISION = ("alexnet", "vgg16", "resnet18", "resnet50", "resnet152", "vit_b_16")

MODELS: dict[str, Callable[[ModelOptions], Task]] = {
    "lenet": _lenet,
    **{name: functools.partial(_vision, name) for name in _VISION},
    "dlrm": _dlrm,
}


def _load_factory(path: str) -> Callable[[], Any]:
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ModelError(
            f"--model {path}: module {module_name!r} cannot be imported ({error}): "
            "put its folder on PYTHONPATH on every host"
        ) from None
    except AttributeError:
        raise ModelError(
            f"--model {path}: module {module_name!r} has no {attribute!r}: write "
            "package.module:factory, where factory() returns a torch.nn.Module"
        ) from None
    if not callable(factory):
        raise ModelError(f"--model {path}: {attribute!r} is a {type(factory).__name__}, no function")
    return factory  # type: ignore[no-any-return]


def _from_factory(path: str, options: ModelOptions) -> Task:
    """A user's model; it may bring `loss(output, target)` and `synthesize(indices)` of its own."""
    try:
        model = _load_factory(path)()
    except HarnessError:
        raise
    except Exception as error:
        raise ModelError(f"--model {path}: the factory raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"--model {path}: the factory returned a {type(model).__name__}, not a torch.nn.Module"
        )
    task = _image_task(model, options)
    loss = getattr(model, "loss", task.loss)
    own: Callable[[Sequence[int]], Any] | None = getattr(model, "synthesize", None)
    if own is None:
        return Task(task.model, loss, task.synthesize)
    return Task(task.model, loss, lambda indices: Batch(*own(indices)))


def build_task(name: str, options: ModelOptions) -> Task:
    """Build a named model, or a user's by `package.module:factory`, with random weights.

    A factory takes no arguments and returns a module over images (samples, 3, size, size), unless the
    module has `synthesize(indices) -> ((inputs...), target)` and `loss(output, target)` (the sum over
    the samples) of its own.

    Raises:
        ModelError: no such model, or it cannot be built with these options.
    """
    if ":" in name:
        return _from_factory(name, options)
    if name not in MODELS:
        raise ModelError(
            f"there is no model {name!r}: use one of {', '.join(MODELS)}, or package.module:factory"
        )
    return MODELS[name](options)

"""A user's own model: `--model package.module:factory`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from harness.errors import ModelError
from harness.runtime.models.example import example_of, task_from_example
from harness.runtime.models.task import InputSpec, ModelOptions, Task, check_weights
from harness.runtime.models.torchvision_import import allow_torchvision

_EXAMPLE = "write it like package.module:factory"


def _load(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"--model {name!r} does not name a factory: {_EXAMPLE}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    allow_torchvision()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = f"start in the directory that holds {module_name}, or set PYTHONPATH"
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            remedy = f"{module_name} needs it: install it into the environment"
        raise ModelError(f"--model {name!r}: {error}; {remedy}, on every node") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"--model {name!r}: {module.__file__} has no callable {attribute!r}")
    return factory  # type: ignore[no-any-return]


def task_from_factory(name: str, options: ModelOptions) -> Task:
    """Call a factory with those of `n_classes`, `n_channels`, `image_size` that it accepts.

    The factory returns a module over images (n, n_channels, image_size, image_size), a model of
    transformers, a pair of a module and example inputs (`example.py`), or a Task.

    Raises:
        ModelError: the factory is missing, fails or returns another type, or its model has
            weights without a shape.
    """
    factory = _load(name)
    offered = {
        "n_classes": options.n_classes,
        "n_channels": options.n_channels,
        "image_size": options.image_size,
    }
    signature = inspect.signature(factory)
    given = {key: value for key, value in offered.items() if key in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ModelError(f"--model {name!r}: {error}; give its arguments defaults") from error
    return task_of(name, factory(**given), options)


def task_of(name: str, built: Any, options: ModelOptions) -> Task:
    """The task of a factory's result.

    Raises:
        ModelError: it has another type, or its model has weights without a shape.
    """
    if isinstance(built, Task):
        check_weights(built.model)
        return built
    example: Any = None
    if isinstance(built, tuple) and len(built) == 2:
        built, example = built
    if not isinstance(built, nn.Module):
        raise ModelError(f"--model {name!r} returned a {type(built).__name__}, not an nn.Module")
    check_weights(built)
    if example is None:
        example = example_of(name, built, options)
    if example is not None:
        return task_from_example(name, built, example)
    side = options.image_size
    images = InputSpec(name="images", shape=(options.n_channels, side, side))
    return Task(model=built, inputs=(images,), n_classes=options.n_classes)

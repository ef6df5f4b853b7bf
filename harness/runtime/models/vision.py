"""Import torchvision also where its compiled operators cannot be loaded.

torchvision's wheel for CUDA does not import on a CPU torch, because operators are missing that
its models, transforms and data sets never call. Declaring them is enough, and is done only
when the plain import fails.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from harness.errors import ModelError

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _forget_half_imported() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


def _define_missing_operators() -> Any:
    library = torch.library.Library("torchvision", "DEF")
    for schema in _MISSING:
        library.define(schema)
    return library


@functools.cache
def torchvision() -> ModuleType:
    """The package, with `models`, `transforms` and `datasets` imported.

    Raises:
        ModelError: it is not installed.
    """
    try:
        return _load()
    except (RuntimeError, OSError):
        _forget_half_imported()
        # The library must outlive the import: its operators vanish with it.
        library = _define_missing_operators()
        module = _load()
        module.__dict__["_harness_library"] = library
        return module
    except ImportError as error:
        raise ModelError(
            f"this model or data set needs torchvision ({error}): run setup/install.sh"
        ) from None


def _load() -> ModuleType:
    for part in ("models", "transforms", "datasets"):
        importlib.import_module(f"torchvision.{part}")
    return importlib.import_module("torchvision")

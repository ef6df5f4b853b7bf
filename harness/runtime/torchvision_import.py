"""Import torchvision also where its compiled operators do not load (a CUDA build on a CPU torch).

Its models, transforms and data sets need none of them; only the import insists that `nms` exists.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def _declare_operators() -> torch.library.Library:
    """The declarations last as long as the returned library, so for the life of the process."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


def import_torchvision(submodule: str) -> ModuleType:
    """Import `torchvision.<submodule>`, declaring operators only if the plain import fails."""
    name = f"torchvision.{submodule}"
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for loaded in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        del sys.modules[loaded]
    _declare_operators()
    return importlib.import_module(name)

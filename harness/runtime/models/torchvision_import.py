"""Let torchvision be imported also where its compiled operators do not load (a CUDA build on a CPU
torch), by whoever imports it: the harness, a user's model, or a library that this uses.

Models, transforms and data sets need none of the operators; only the import insists that some are
declared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# Imported after torchvision has tried to load its operators; it describes some of them.
_NEEDS_OPERATORS = "torchvision._meta_registrations"


@cache
def _declare_missing() -> torch.library.Library:
    """The declarations last as long as the returned library, so for the life of the process."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return library


class _Declaring(MetaPathFinder):
    """Finds no module; declares operators just before the module that needs them is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NEEDS_OPERATORS:
            _declare_missing()
        return None


def allow_torchvision() -> None:
    """Let this process and its forks import torchvision; call it before code that may do so."""
    if not any(isinstance(finder, _Declaring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Declaring())


def import_torchvision(submodule: str) -> ModuleType:
    """Import `torchvision.<submodule>`."""
    allow_torchvision()
    return importlib.import_module(f"torchvision.{submodule}")

"""Make torchvision importable even if its compiled operators do not load (a CUDA build on a CPU
torch), whether the harness or a user's model imports it.

Models, transforms and data sets do not call the operators, but the import needs declarations of
some.
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
# The module that needs the declarations; torchvision imports it after loading its operators.
_NEEDS_OPERATORS = "torchvision._meta_registrations"


@cache
def _declare_missing() -> torch.library.Library:
    """Declare missing operators; the cache keeps the library, and so the declarations, alive."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return library


class _Declaring(MetaPathFinder):
    """Declares operators just before the module that needs them is imported; finds no module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NEEDS_OPERATORS:
            _declare_missing()
        return None


def allow_torchvision() -> None:
    """Make torchvision importable in this process; call it before code that may import it."""
    if not any(isinstance(finder, _Declaring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Declaring())


def import_torchvision(submodule: str) -> ModuleType:
    """Import `torchvision.<submodule>`."""
    allow_torchvision()
    return importlib.import_module(f"torchvision.{submodule}")

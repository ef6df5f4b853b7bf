"""Modules, not of torch, that a graph keeps as one operator of a known kind."""

from __future__ import annotations

from torch import nn

from harness.runtime.models.attention import GroupedAttention
from harness.runtime.models.mixture import Router


def is_single_operator(module: nn.Module) -> bool:
    """Whether a graph keeps a module as one known operator."""
    return isinstance(module, GroupedAttention | Router)

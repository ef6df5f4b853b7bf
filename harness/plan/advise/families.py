"""Families of strategies, as users choose them."""

from __future__ import annotations

# By the first word of a standard strategy's name.
_FAMILIES = {
    "single": "single",
    "ddp": "ddp",
    "tensor": "tensor",
    "hybrid": "hybrid",
    "tables": "hybrid",
    "pipeline": "pipeline",
    "interleaved": "pipeline",
}
FAMILIES = (*dict.fromkeys(_FAMILIES.values()), "searched")


def family_of(name: str) -> str:
    """The family of a standard strategy."""
    return _FAMILIES[name.split()[0].rstrip(",")]

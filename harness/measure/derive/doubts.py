"""Reasons to doubt numbers, by kind."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class DoubtKind(StrEnum):
    """Kinds of doubt, in the report's words and order."""

    SPREAD = "Steps are few or vary"
    OUTLIERS = "Outlier steps"
    STRAGGLER = "Stragglers"
    STOLEN = "Processor time taken by other guests"
    PEAK = "Measured peak too low"
    MFU = "MFU above 1"
    LEFT_OUT = "Measurements left out"
    VERSIONS = "Versions differ between runs"


class Doubt(NamedTuple):
    """One reason to doubt the numbers of a run."""

    kind: DoubtKind
    text: str

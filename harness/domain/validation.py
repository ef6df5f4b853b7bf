"""How predictions agree with steps that others measured: `validation-SET.json` in a results
directory, which the report draws."""

from __future__ import annotations

import msgspec

from harness.domain.files import Count, FileKind, JsonFile, Number
from harness.errors import ResultsError

SCHEMA = "harness-validation"
SCHEMA_VERSION = 1


def validation_file(name: str) -> str:
    """Name of a set's file in a results directory."""
    return f"validation-{name}.json"


class ValidatedPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step and its prediction.

    Attributes:
        name: of the strategy and what it ran on.
        cell: model and cluster, in which points compete.
        part: of the set, with scores of its own; empty if it has none.
        samples: of the step.
        measured_s: None if the run failed.
        fits: whether the prediction fits into memory.
        measured_bytes: peak of a device; None when unknown.
        calibrates: why it is not judged; empty if it is.
        limit_bytes: memory of a device; 0 in files that do not say it.
    """

    name: str
    cell: str
    samples: Number
    measured_s: Number | None
    predicted_s: Number
    fits: bool
    predicted_bytes: Count
    measured_bytes: Number | None = None
    calibrates: str = ""
    part: str = ""
    limit_bytes: Count = 0


class PartScores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scores of a part of a set, such as one model; as those of `Validation`."""

    part: str
    n_expressed: Count
    median_error: Number | None
    p90_error: Number | None
    spearman: Number | None
    regret: Number | None
    n_failed: Count = 0
    n_failed_called: Count = 0
    n_ran_called_failed: Count = 0


class Validation(JsonFile, frozen=True, kw_only=True):
    """Scores and points of one set.

    Attributes:
        n_expressed: points that were predicted and are judged.
        median_error, p90_error: of |predicted / measured - 1|, over points that ran.
        spearman: mean over cells of 3 points or more, of seconds per sample; points that calibrate
            take part, because a user has them to choose from.
        regret: mean over cells of 2 or more: loss by choosing the predicted fastest.
        source_median_error, trivial_median_error: of the source's own predictor and of the trivial
            model, over the same points; None where unknown.
        not_expressed: number of points by reason; with `n_expressed` they are all points.
        n_failed, n_failed_called: runs that failed; of these, those that are predicted not to fit.
        n_ran_called_failed: runs that succeeded and are predicted not to fit.
        memory_median_error: of the predicted peak.
        parts: scores of the set's parts, if it has several.
        bias: median of predicted / measured - 1.
        notes: what was assumed and calibrated.
        missing: terms that the predictions lack, and how large each is.
    """

    FILE = FileKind("validation", SCHEMA, SCHEMA_VERSION, ResultsError, "validate again")

    set: str
    n_points: Count
    n_expressed: Count
    median_error: Number | None
    p90_error: Number | None
    spearman: Number | None
    regret: Number | None
    source_median_error: Number | None
    trivial_median_error: Number | None
    not_expressed: dict[str, Count]
    n_failed: Count = 0
    n_failed_called: Count = 0
    n_ran_called_failed: Count = 0
    memory_median_error: Number | None = None
    parts: list[PartScores] = msgspec.field(default_factory=list)
    bias: Number | None = None
    notes: list[str] = msgspec.field(default_factory=list)
    missing: list[str] = msgspec.field(default_factory=list)
    points: list[ValidatedPoint] = msgspec.field(default_factory=list)
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

"""The simulated step of a run: `prediction.json` in the run's directory, written before it starts.

`strategy.json` beside it is the strategy that was trained. Spans are those of one step, by rank,
in the form of a measured run, so that a figure can draw both.

`validation-SET.json` in a results directory, which the report draws: how predictions agree with
steps that others measured.
"""

from __future__ import annotations

import msgspec

from harness.domain.files import Count, FileKind, JsonFile, Number
from harness.domain.record import Bytes, Duration, Moment, Span, Value
from harness.errors import ResultsError

SCHEMA = "harness-prediction"
SCHEMA_VERSION = 2
_SET_SCHEMA, _SET_VERSION = "harness-validation", 1
PREDICTION_FILE = "prediction.json"
STRATEGY_FILE = "strategy.json"


class Prediction(JsonFile, frozen=True, kw_only=True):
    """A simulated step.

    Attributes:
        strategy: the strategy's name.
        method: how it was found, such as `search` or `builder`.
        memory_bytes: peak by device name.
        spans: by rank (a decimal number, as JSON has it), of one step, from its start.
        contention_s: by rank, the slowdown of computing by concurrent transfers; None when
            unknown.
        sent_bytes: by rank, the bytes that its node sends to other nodes; empty when unknown.
        profile_fit_error: largest relative error of the fitted times that were used; None if
            all were measured.
        search_s: wall seconds of the search; None without one.
        calibrations: those of the profile that was used (see `Profile.calibrations`).
    """

    FILE = FileKind("prediction", SCHEMA, SCHEMA_VERSION, ResultsError, "run it again")

    strategy: str
    method: str
    step_s: Duration
    memory_bytes: dict[str, Bytes] = msgspec.field(default_factory=dict)
    spans: dict[str, list[Span]] = msgspec.field(default_factory=dict)
    contention_s: dict[str, Moment] | None = None
    sent_bytes: dict[str, Bytes] = msgspec.field(default_factory=dict)
    profile_fit_error: Value | None = None
    search_s: Duration | None = None
    calibrations: dict[str, Value] = msgspec.field(default_factory=dict)
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

    def to_json(self) -> bytes:
        """Encode the file without indentation, because it holds many spans."""
        return msgspec.json.encode(self) + b"\n"


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

    FILE = FileKind("validation", _SET_SCHEMA, _SET_VERSION, ResultsError, "validate again")

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
    schema: str = _SET_SCHEMA
    version: int = _SET_VERSION

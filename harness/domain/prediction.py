"""The simulated step of a run: `prediction.json` in the run's directory, written before it starts.

`strategy.json` beside it is the strategy that was trained. Spans are those of one step, by rank,
in the form of a measured run, so that a figure can draw both.
"""

from __future__ import annotations

import msgspec

from harness.domain.files import FileKind, JsonFile
from harness.domain.record import Bytes, Duration, Moment, Span, Value
from harness.errors import ResultsError

SCHEMA = "harness-prediction"
SCHEMA_VERSION = 2
PREDICTION_FILE = "prediction.json"
STRATEGY_FILE = "strategy.json"


class Prediction(JsonFile, frozen=True, kw_only=True):
    """A simulated step.

    Attributes:
        strategy: the strategy's name.
        method: how it was found, such as `search` or `builder`.
        step_s: seconds.
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

"""Measurements of a rank: spans (named intervals) and samples (named numbers).

One JSON object per line of `rank<k>.jsonl`, tagged by `type`. Values are raw: rates, medians and
overlaps are derived from the files (docs/metrics.md). Decoding refuses numbers out of bounds;
`labels.py` defines the labels of each metric.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta

SpanKind = Literal[
    "step", "data", "host_to_device", "forward", "backward", "communication", "optimizer",
    "compute", "change",
]  # fmt: skip

# `backward` computes gradients of inputs, or of inputs and weights together.
Pass = Literal["forward", "recompute", "backward", "weights"]

Label = str | int | float | bool

# Bound of clock readings, such that their sums, products and squares stay finite.
Moment = Annotated[float, Meta(ge=-1e12, le=1e12)]
Duration = Annotated[float, Meta(ge=0, le=1e9)]
Value = Annotated[float, Meta(ge=-1e40, le=1e40)]
Step = Annotated[int, Meta(ge=0, le=2**53)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Name = Annotated[str, Meta(max_length=1000)]
Number = Annotated[int, Meta(ge=0, le=10**9)]


class SpanFields(TypedDict, total=False):
    """The optional fields of `Span`."""

    name: str
    n_bytes: int | None
    stage: int
    microbatch: int
    pass_: Pass
    operator: str
    peer: int
    is_wait: bool


class Span(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="span",
    tag_field="type",
    omit_defaults=True,
    gc=False,
):
    """A named interval on one rank.

    Attributes:
        kind: activity of the rank; `step` spans enclose the phases of one step.
        name: for people only, such as `bucket3`, where the other fields do not suffice.
        step: the step (or iteration) it belongs to, counted from 0 after warm-up.
        start_s: seconds since the recorder's origin on this rank (monotonic).
        duration_s: seconds.
        n_bytes: bytes moved, for data, host_to_device and communication.
        stage: pipeline stage of the pass.
        microbatch: its number within the step.
        pass_: the pass that is computed, None if `kind` names it; for a transfer, `forward` for
            outputs and `backward` for their gradients.
        operator: the operator that is computed or whose output is sent; the first of several.
        peer: the other rank of a transfer.
        is_wait: the rank is blocked until a transfer ends.
    """

    kind: SpanKind
    start_s: Moment
    duration_s: Duration
    name: Name = ""
    step: Step | None = None
    n_bytes: Bytes | None = None
    stage: Number | None = None
    microbatch: Number | None = None
    pass_: Pass | None = msgspec.field(default=None, name="pass")
    operator: Name | None = None
    peer: Number | None = None
    is_wait: bool = False

    @property
    def label(self) -> str:
        """Label for people, such as `weights of conv1 #3`; empty if the kind suffices."""
        subject = self.name or self.operator
        if not subject:
            subject = "" if self.stage is None else f"stage{self.stage}"
        before = "wait for " if self.is_wait else ""
        before += _PREFIXES.get((self.kind == "communication", self.pass_), "")
        after = "" if self.microbatch is None else f" #{self.microbatch}"
        after += f" from rank {self.peer}" if self.is_wait and self.peer is not None else ""
        return f"{before}{subject}{after}" if subject else ""


# Start of a label, by (whether the span is a transfer, pass).
_PREFIXES: dict[tuple[bool, Pass | None], str] = {
    (False, "weights"): "weights of ",
    (False, "recompute"): "recompute ",
    (True, "backward"): "gradient of ",
}


class Sample(
    msgspec.Struct, frozen=True, kw_only=True, tag="sample", tag_field="type", omit_defaults=True
):
    """A named number on one rank.

    Attributes:
        metric: its name, ending in its unit: `collective_s`, `nic_sent_bytes`, `loss`.
        value: the number as measured.
        labels: conditions of the measurement: {"operation": "all_reduce", "n_bytes": 1024}.
        step: the step or iteration, counted from 0 after warm-up.
        time_s: seconds since the recorder's origin, for time series.
    """

    metric: Name
    value: Value
    labels: dict[str, Label] = {}
    step: Step | None = None
    time_s: Moment | None = None


Record = Span | Sample

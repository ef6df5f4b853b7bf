"""What a rank measures: spans (named intervals) and samples (named numbers).

One JSON object per line of `rank<k>.jsonl`, tagged by `type`. Values are raw: rates,
medians and overlaps are derived later, from files (docs/metrics.md). Decoding refuses numbers out
of bounds; `labels.py` says which labels a metric has.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SpanKind = Literal[
    "step", "data", "host_to_device", "forward", "backward", "communication", "optimizer", "compute"
]

Label = str | int | float | bool

# No clock counts beyond; sums, products and squares of what lies within stay finite.
Moment = Annotated[float, Meta(ge=-1e12, le=1e12)]
Duration = Annotated[float, Meta(ge=0, le=1e9)]
Value = Annotated[float, Meta(ge=-1e40, le=1e40)]
Step = Annotated[int, Meta(ge=0, le=2**53)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Name = Annotated[str, Meta(max_length=1000)]


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
        kind: what the rank was doing; `step` spans enclose the phases of one step.
        name: which one, such as `bucket3` or `conv1`; empty when the kind says it all.
        step: the step (or iteration) it belongs to, counted from 0 after warm-up.
        start_s: seconds since the recorder's origin on this rank (monotonic).
        duration_s: seconds.
        n_bytes: bytes moved, for data, host_to_device and communication.
    """

    kind: SpanKind
    start_s: Moment
    duration_s: Duration
    name: Name = ""
    step: Step | None = None
    n_bytes: Bytes | None = None


class Sample(
    msgspec.Struct, frozen=True, kw_only=True, tag="sample", tag_field="type", omit_defaults=True
):
    """A named number on one rank.

    Attributes:
        metric: its name, ending in its unit: `collective_s`, `nic_sent_bytes`, `loss`.
        value: the number as measured.
        labels: what it was measured on, such as {"operation": "all_reduce", "n_bytes": 1024}.
        step: the step or iteration, counted from 0 after warm-up.
        time_s: seconds since the recorder's origin, for time series.
    """

    metric: Name
    value: Value
    labels: dict[str, Label] = {}
    step: Step | None = None
    time_s: Moment | None = None


Record = Span | Sample

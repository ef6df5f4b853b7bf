"""What a rank measures: spans (named intervals) and samples (named numbers).

One JSON object per line of `rank<k>.jsonl`, tagged by `type`. Values are raw: rates,
medians and overlaps are derived later, from files (docs/metrics.md).
"""

from __future__ import annotations

from typing import Literal

import msgspec

SpanKind = Literal[
    "step", "data", "host_to_device", "forward", "backward", "communication", "optimizer", "compute"
]

Label = str | int | float | bool


class Span(
    msgspec.Struct, frozen=True, kw_only=True, tag="span", tag_field="type", omit_defaults=True
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
    start_s: float
    duration_s: float
    name: str = ""
    step: int | None = None
    n_bytes: int | None = None


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

    metric: str
    value: float
    labels: dict[str, Label] = {}
    step: int | None = None
    time_s: float | None = None


Record = Span | Sample

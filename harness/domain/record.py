"""Measurements of a rank: spans and samples, and the labels of each metric.

One JSON object per line of `rank<k>.jsonl`, tagged by `type`. Values are raw: rates, medians and
overlaps are derived from the files (docs/metrics.md). Decoding refuses numbers out of bounds,
and wrong labels of a metric.

A metric that is not listed may have any labels (docs/metrics.md lists all metrics).
"""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, TypedDict

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

# Samples of each step, which a step without details has not.
_DETAILS = frozenset({"nic_sent_bytes", "nic_received_bytes", "n_samples", "n_synchronisations"})
_FIRST_STEPS = 1000


def has_details(step: int) -> bool:
    """Whether a step's phases and counters are recorded: those of the first 1,000 steps, of each
    tenth step below 10,000, of each hundredth below 100,000, and so on, because long trainings
    would fill disks. The time of every step is recorded."""
    stride = 1
    while step >= _FIRST_STEPS * stride:
        stride *= 10
    return step % stride == 0


def is_detail(record: Record) -> bool:
    """Whether a record is one of a step's phases or counters."""
    if record.step is None:
        return False
    if isinstance(record, Span):
        return record.kind not in ("step", "change")
    return record.metric in _DETAILS


MAX_TEXT = 1000
# Clocks cannot tell shorter times from 0; rates need longer ones.
SHORTEST_S = 1e-9
MAX_SIZE = 2**60
MAX_RANK = 2**16


class LabelKind(NamedTuple):
    """The values that a label may have, in words and as a test."""

    words: str
    allows: Callable[[Label], bool]


def _whole_number(low: int, high: int) -> LabelKind:
    return LabelKind(
        f"a whole number from {low} to {high}",
        lambda value: type(value) is int and low <= value <= high,
    )


SIZE = _whole_number(1, MAX_SIZE)
N_BYTES = _whole_number(0, MAX_SIZE)
RANK = _whole_number(0, MAX_RANK)
TEXT = LabelKind(
    f"a text of at most {MAX_TEXT} letters",
    lambda value: isinstance(value, str) and len(value) <= MAX_TEXT,
)

_PRODUCT = {"m": SIZE, "n": SIZE, "k": SIZE, "dtype": TEXT}
_SUMMA = _PRODUCT | {"scaling": TEXT}
_PAIR = {"source": RANK, "target": RANK, "transport": TEXT}
_CHANGE = {"change": _whole_number(0, MAX_SIZE)}  # its number among the run's
_AMOUNTS = ("_s", "_bytes", "_flops")
_SIGNED = ("clock_offset_s", "link_transfer_s")  # a difference of times
_ROUNDING = 1e-6  # rounding error of amounts that are differences: they may be this far below 0
_OF_PAIRS = ("link_latency_s", "link_transfer_s", "change_bytes", "change_predicted_bytes")

REQUIRED: dict[str, dict[str, LabelKind]] = {
    "matmul_s": _PRODUCT,
    "matmul_error": _PRODUCT,
    "matmul_skipped": {"n": SIZE, "dtype": TEXT, "reason": TEXT},
    "memory_copy_s": {"n_bytes": SIZE},
    "memory_triad_s": {"n_bytes": SIZE},
    "summa_s": _SUMMA,
    "summa_compute_s": _SUMMA,
    "summa_communication_s": _SUMMA,
    "summa_exposed_communication_s": _SUMMA,
    "collective_s": {"operation": TEXT, "transport": TEXT, "n_bytes": N_BYTES},
    "link_latency_s": _PAIR,
    "link_transfer_s": _PAIR | {"n_bytes": N_BYTES},
    "change_s": _CHANGE | {"before": TEXT, "after": TEXT, "why": TEXT},
    "change_bytes": _CHANGE | {"source": RANK, "target": RANK},
    "change_predicted_bytes": _CHANGE | {"source": RANK, "target": RANK},
    **dict.fromkeys(
        ("change_predicted_s", "change_build_s", "change_step_predicted_s", "cache_received_bytes"),
        _CHANGE,
    ),
    "kernel_s": {"name": TEXT},
    "gradient_square_norm": {"n_distinct": SIZE},
    "operator_skipped": {"operator": TEXT, "shape": TEXT, "reason": TEXT},
}
OPTIONAL: dict[str, dict[str, LabelKind]] = {
    metric: {"n_ranks": _whole_number(1, MAX_RANK)} for metric in REQUIRED if "summa" in metric
} | {"memory_peak_bytes": {"kind": TEXT}}


def record_problem(record: Record, n_ranks: int) -> str:
    """Why a decoded record of a run of `n_ranks` cannot be used; empty when it can."""
    if isinstance(record, Span):
        is_empty = record.kind == "step" and record.duration_s < SHORTEST_S
        return f"a step of {record.duration_s:g} s" if is_empty else ""
    if record.value < -_ROUNDING and _is_amount(record.metric):
        return f"{record.metric} is {record.value:g}: it must not be below 0"
    if record.metric in REQUIRED or record.metric in OPTIONAL:
        return _label_problem(record) or _rank_problem(record, n_ranks)
    return ""


def _is_amount(metric: str) -> bool:
    return metric.startswith("n_") or (metric.endswith(_AMOUNTS) and metric not in _SIGNED)


def _rank_problem(sample: Sample, n_ranks: int) -> str:
    if sample.metric not in _OF_PAIRS:
        return ""
    rank = max(int(sample.labels[name]) for name in ("source", "target"))
    return f"{sample.metric} names rank {rank} of {n_ranks}" if rank >= n_ranks else ""


def _label_problem(sample: Sample) -> str:
    labels, metric = sample.labels, sample.metric
    for name, kind in REQUIRED.get(metric, {}).items():
        if name not in labels:
            return f"{metric} has no label {name}: it must be {kind.words}"
        if not kind.allows(labels[name]):
            return f"{metric} has {name} {_shown(labels[name])}: it must be {kind.words}"
    for name, kind in OPTIONAL.get(metric, {}).items():
        if name in labels and not kind.allows(labels[name]):
            return f"{metric} has {name} {_shown(labels[name])}: it must be {kind.words}"
    return ""


def _shown(value: Label) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"

"""Labels of each metric, validated when records are read, so that derivations need not check.

A metric that is not listed may have any labels (docs/metrics.md lists all metrics).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from harness.domain.record import Label, Record, Sample, Span

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
_AMOUNTS = ("_s", "_bytes", "_flops")
_SIGNED = ("clock_offset_s", "link_transfer_s")  # a difference of times
_ROUNDING = 1e-6  # rounding error of amounts that are differences: they may be this far below 0
_OF_PAIRS = (
    "link_latency_s",
    "link_transfer_s",
    "change_bytes",
    "change_predicted_bytes",
)

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
    "change_s": {"before": TEXT, "after": TEXT, "why": TEXT},
    "change_bytes": {"source": RANK, "target": RANK},
    "change_predicted_bytes": {"source": RANK, "target": RANK},
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

"""One rank's records: read from lines, and indexed for derivations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from harness.domain.record import Record, Sample, Span, SpanKind, has_details, record_problem
from harness.inputs import open_regular

# Most unusable lines of a file that are named; the rest is counted.
MAX_NAMED = 3
# Bound of ranks in labels if the run's header names no rank.
MAX_RANKS = 1024
KIND_CODES = {kind: code for code, kind in enumerate(get_args(SpanKind))}

# A record has a few hundred bytes.
_MAX_LINE_BYTES = 1 << 16
_LINES_AT_ONCE = 4096
_CUT = "the file ends within this line, so the numbers lack what followed: was a copy interrupted?"
_DECODER = msgspec.json.Decoder(Record)


class Spans:
    """The spans of one rank that name a step, as columns, grouped by step.

    Attributes:
        steps: every step, ascending.
        group: position of each span's step in `steps`.
        kind: code of each span's kind, by KIND_CODES.
        is_wait: flag of each span.
        is_detailed: flag of each step, false where only its time was recorded (`has_details`).
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        in_steps = [span for span in spans if span.step is not None]
        step = np.array([span.step for span in in_steps], dtype=np.int64)
        self.steps, group = np.unique(step, return_inverse=True)
        order = np.argsort(group, kind="stable")
        self.spans = [in_steps[at] for at in order]
        self.group = group[order]
        n = len(in_steps)
        codes = (KIND_CODES[span.kind] for span in self.spans)
        self.kind = np.fromiter(codes, np.int8, n)
        self.start_s = np.fromiter((span.start_s for span in self.spans), float, n)
        self.duration_s = np.fromiter((span.duration_s for span in self.spans), float, n)
        self.is_wait = np.fromiter((span.is_wait for span in self.spans), bool, n)
        n_spans = np.bincount(self.group, minlength=len(self.steps))
        self.is_detailed = (n_spans > 1) | np.array([has_details(s) for s in self.steps], bool)

    @cached_property
    def whole(self) -> np.ndarray:
        """Position of the first `step` span of each step; -1 for an unfinished step."""
        found = np.full(len(self.steps), -1)
        ends = np.flatnonzero(self.kind == KIND_CODES["step"])[::-1]
        found[self.group[ends]] = ends
        return found


class Records(list[Record]):
    """Records in file order."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> Records:
        """The same records, indexed."""
        return records if isinstance(records, Records) else cls(records)

    @cached_property
    def spans(self) -> list[Span]:
        return [record for record in self if isinstance(record, Span)]

    @cached_property
    def stages(self) -> frozenset[int]:
        """Stages that the rank computes; empty without the executor."""
        return frozenset(span.stage for span in self.spans if span.stage is not None)

    @cached_property
    def columns(self) -> Spans:
        return Spans(self.spans)

    @cached_property
    def by_step(self) -> dict[int, list[Span]]:
        """The spans that name a step, in the order of steps."""
        columns = self.columns
        ends = np.searchsorted(columns.group, np.arange(len(columns.steps)), side="right")
        starts = [0, *ends][: len(ends)]
        return {
            int(step): columns.spans[start:end]
            for step, start, end in zip(columns.steps, starts, ends, strict=True)
        }

    @cached_property
    def samples(self) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = defaultdict(list)
        for record in self:
            if isinstance(record, Sample):
                found[record.metric].append(record)
        return dict(found)


def read_records(path: Path, n_ranks: int = MAX_RANKS) -> tuple[Records, list[str]]:
    """Read one rank's lines.

    Returns:
        The records, and the skipped lines: the first MAX_NAMED with the reason, then the number of
        others.

    Raises:
        OSError: the file cannot be read.
    """
    records = Records()
    problems: list[str] = []
    n_skipped, number = 0, 1
    with open_regular(path) as file:
        every = iter(partial(file.readline, _MAX_LINE_BYTES), b"")
        while lines := list(islice(every, _LINES_AT_ONCE)):
            found = _decode_all(lines, n_ranks)
            if found is not None:
                records += found
                number += len(lines)
                continue
            for line in lines:
                problem = _decode_into(records, line, n_ranks)
                if problem:
                    n_skipped += 1
                    problems += [f"line {number}: {problem}"] if n_skipped <= MAX_NAMED else []
                number += line.endswith(b"\n")
    if n_skipped > MAX_NAMED:
        problems.append(f"{n_skipped - MAX_NAMED} more lines, {n_skipped} in all")
    return records, problems


def _decode_all(lines: Sequence[bytes], n_ranks: int) -> list[Record] | None:
    """Decode lines that are all valid; None if one is not."""
    try:
        records = _DECODER.decode_lines(b"".join(lines))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_whole = len(records) == len(lines)
    return None if not is_whole or any(record_problem(r, n_ranks) for r in records) else records


def _decode_into(records: list[Record], line: bytes, n_ranks: int) -> str:
    """Decode a line into `records`; returns the reason if it is skipped, else empty."""
    if not line.strip():
        return ""
    if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
        return f"longer than {_MAX_LINE_BYTES} bytes"
    try:
        record = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return str(error) if line.endswith(b"\n") else _CUT
    if problem := record_problem(record, n_ranks):
        return problem
    records.append(record)
    return ""

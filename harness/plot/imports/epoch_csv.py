"""Per-epoch CSVs: one row per rank and epoch, with the GPU's state at the epoch's end.

    Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,...,GPU_Used_Mem_MB,...

Columns are found by name, in any order and spelling of case; others are left alone. Rows may come
in any order of ranks. MB in these files is nvidia-smi's: 2**20 bytes.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import ResultsError

REQUIRED = ("rank", "epoch", "computationtime")
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch of one rank; None is what the file does not say.

    Attributes:
        occurrence: how often this rank and epoch came before: a log that a second training was
            appended to holds two repeats.
        at: the epoch's end by the writer's clock, without a time zone (UTC where one was given).
    """

    rank: int
    epoch: int
    occurrence: int
    duration_s: float
    at: datetime | None
    device_id: int
    device_kind: str
    utilization_percent: float | None
    temperature_c: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None


def is_epoch_csv(text: str) -> bool:
    """Whether the first line names the columns that make an epoch log."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    names = {_plain(name) for name in first.lstrip("\ufeff").split(",")}
    return set(REQUIRED) <= names


def _plain(name: str | None) -> str:
    return re.sub(r"[^a-z0-9]", "", (name or "").lower())


def _number(text: str | None) -> float | None:
    """A number with or without a percent sign; None when there is none."""
    try:
        value = float((text or "").strip().rstrip("%"))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def parse_time(text: str | None) -> datetime | None:
    """A time in any ISO 8601 form; one with a zone is turned to UTC."""
    try:
        at = datetime.fromisoformat((text or "").strip())
    except ValueError:
        return None
    return at.astimezone(UTC).replace(tzinfo=None) if at.tzinfo else at


def _bytes(mib: float | None) -> float | None:
    return None if mib is None else mib * MIB


def _row(cells: dict[str, str], seen: Counter[tuple[int, int]]) -> EpochRow | None:
    rank, epoch, duration_s = (_number(cells.get(name)) for name in REQUIRED)
    if rank is None or epoch is None or duration_s is None or duration_s <= 0 or rank < 0:
        return None
    if rank != int(rank) or epoch != int(epoch):
        return None
    at = (int(rank), int(epoch))
    seen[at] += 1
    return EpochRow(
        rank=at[0],
        epoch=at[1],
        occurrence=seen[at] - 1,
        duration_s=duration_s,
        at=parse_time(cells.get("timestamp")),
        device_id=int(_number(cells.get("gpuid")) or 0),
        device_kind=(cells.get("gpuname") or "").strip(),
        utilization_percent=_number(cells.get("gpuload")),
        temperature_c=_number(cells.get("gputempc")),
        memory_used_bytes=_bytes(_number(cells.get("gpuusedmemmb"))),
        memory_total_bytes=_bytes(_number(cells.get("gputotalmemmb"))),
    )


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        if line.strip():
            yield number, next(csv.reader([line]))


def parse_epoch_csv(text: str, path: Path) -> tuple[list[EpochRow], list[str]]:
    """Read a file's text; returns its rows and a reason for each line that was skipped.

    Raises:
        ResultsError: a required column is missing, or no line is usable; names the path.
    """
    lines = list(_lines(text))
    names = [_plain(name) for name in lines[0][1]] if lines else []
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ResultsError(
            f"{path} has no column {', '.join(missing)} (rank, epoch and computation time are "
            "needed): is it a per-epoch CSV?"
        )
    rows: list[EpochRow] = []
    problems: list[str] = []
    seen: Counter[tuple[int, int]] = Counter()
    is_cut = not text.endswith(("\n", "\r"))
    for number, fields in lines[1:]:
        if [_plain(field) for field in fields] == names:
            continue  # the header again: a second training was appended
        if len(fields) < len(names):
            problems.append(f"line {number}: {len(fields)} of {len(names)} columns")
            continue
        if is_cut and number == lines[-1][0]:
            # The last field of a line without an end may be cut short and still look like a number.
            fields[-1] = ""
        row = _row(dict(zip(names, fields, strict=False)), seen)
        if row is None:
            problems.append(f"line {number}: rank, epoch or time is not a number")
        else:
            rows.append(row)
    if not rows:
        raise ResultsError(f"{path} holds no usable line: is it empty or cut off?")
    return rows, problems

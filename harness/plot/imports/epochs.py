"""Runs of per-epoch CSVs."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from harness.domain.record import Record, Sample
from harness.errors import ResultsError
from harness.plot.imports.epoch_csv import EpochRow, is_epoch_csv, parse_epoch_csv
from harness.plot.imports.runs import (
    Devices,
    ImportedRun,
    Log,
    LogReader,
    extent_of,
    n_gpus_named,
    read_text,
    seconds_at,
)
from harness.units import parse_bytes

_MOST_REPEATS = 64


def devices_of(rows: Sequence[EpochRow], log: Log, n_ranks: int) -> Devices:
    """The GPU of each rank.

    Raises:
        ResultsError: neither the rows nor flags name one.
    """
    by_rank: dict[int, tuple[int, str, int]] = {}
    given_memory = parse_bytes(log.facts.device_memory) if log.facts.device_memory else 0
    for row in rows:
        kind = row.device_kind or log.facts.device_kind
        memory = row.memory_total_bytes or given_memory
        if kind and memory > 0:
            by_rank.setdefault(row.rank, (row.device_id, kind, int(memory)))
    given = log.given_device
    missing = set(range(n_ranks)) - {row.rank for row in rows}
    if len({device[1:] for device in by_rank.values()}) == 1:  # missing ranks have it too
        _, kind, memory = next(iter(by_rank.values()))
        are_indexed = all(index == rank for rank, (index, _, _) in by_rank.items())
        by_rank |= {rank: (rank if are_indexed else 0, kind, memory) for rank in missing}
    known = [by_rank.get(rank, given and (0, *given)) for rank in range(n_ranks)]
    if any(device is None for device in known):
        raise ResultsError(
            f"{log.path} does not name the GPU and memory of rank {known.index(None)}: "
            "give --device-kind and --device-memory"
        )
    return [device for device in known if device]


def devices_beside(log: Log, n_ranks: int) -> Devices:
    """GPUs of a log that names none: given, or from a CSV of as many in the same directory.

    Raises:
        ResultsError: there is neither.
    """
    if given := log.given_device:
        return [(0, *given)] * n_ranks
    if log.facts.device_kind or log.facts.device_memory:
        raise ResultsError(f"{log.path} names no GPU: give both --device-kind and --device-memory")
    for sibling in sorted(log.path.parent.glob("*.csv")):
        if sibling.is_file() and n_gpus_named(sibling) == n_ranks:
            text = read_text(sibling)
            if is_epoch_csv(text):
                rows = parse_epoch_csv(text, sibling)[0]
                if max(row.rank for row in rows) < n_ranks:
                    return devices_of(rows, log._replace(path=sibling), n_ranks)
    raise ResultsError(
        f"{log.path} does not name its GPUs and no CSV of {n_ranks} GPUs is in its directory: "
        "give --device-kind and --device-memory"
    )


def _n_ranks(rows: Sequence[EpochRow], log: Log) -> int:
    """Number of ranks, from the rows and the file's name; reports ranks without a line."""
    seen = {row.rank for row in rows}
    n_ranks = max(max(seen) + 1, n_gpus_named(log.path) or 1)
    missing = sorted(set(range(n_ranks)) - seen)
    if missing:
        names = ", ".join(map(str, missing[:8])) + (" ..." if missing[8:] else "")
        log.skipped.append(f"no line of rank {names} of {n_ranks}: the others are kept")
    return n_ranks


def _epoch_records(
    rows: Iterable[EpochRow], n_samples: float, origin: datetime | None, first: int
) -> list[Record]:
    records: list[Record] = []
    for row in sorted(rows, key=lambda row: row.epoch):
        time_s = seconds_at(row.at, origin)
        step = row.epoch - first
        if not row.is_extra:
            records.append(Sample(metric="epoch_s", value=row.duration_s, step=step, time_s=time_s))
            records.append(Sample(metric="n_samples", value=n_samples, step=step))
        for metric, value in (
            ("device_utilization_percent", row.utilization_percent),
            ("device_temperature_c", row.temperature_c),
            ("memory_used_bytes", row.memory_used_bytes),
        ):
            if value is not None:
                labels: dict[str, Any] = {"device": f"cuda:{row.device_id}"}
                records.append(Sample(metric=metric, value=value, labels=labels, time_s=time_s))
    return records


def _read(log: Log) -> list[ImportedRun]:
    """A run for each repeat."""
    rows, skipped = parse_epoch_csv(log.text, log.path)
    log.skipped.extend(skipped)
    facts, n_ranks = log.facts, _n_ranks(rows, log)
    devices = devices_of(rows, log, n_ranks)
    first = min(1, min(row.epoch for row in rows))  # logs count from 0 or from 1
    scaling = "weak" if "weak" in log.path.stem.lower() else "strong"
    per_rank = facts.epoch_samples * (facts.weak_share if scaling == "weak" else 1 / n_ranks)
    config = log.config(n_ranks, scaling=scaling, samples_per_epoch=round(per_rank * n_ranks))
    found = []
    n_repeats = 1 + max(row.occurrence for row in rows)
    if n_repeats > _MOST_REPEATS:
        raise ResultsError(
            f"{log.path} has an epoch of a rank {n_repeats} times: import at most {_MOST_REPEATS} "
            "trainings from one file"
        )
    for repeat in sorted({row.occurrence for row in rows}):
        of_repeat = [row for row in rows if row.occurrence == repeat]
        origin, end_s = extent_of([(row.at, row.duration_s) for row in of_repeat])
        # Also of a rank without a line, because the job's samples count over all ranks.
        steps = sorted({row.epoch - first for row in of_repeat})
        shares = [Sample(metric="n_samples", value=per_rank, step=step) for step in steps]
        records: dict[int, list[Record]] = {
            rank: _epoch_records((r for r in of_repeat if r.rank == rank), per_rank, origin, first)
            or [*shares]
            for rank in range(n_ranks)
        }
        run_id = log.name if repeat == 0 else f"{log.name}-repeat{repeat}"
        found.append(ImportedRun(run_id, config, devices, records, origin, end_s, repeat))
    return found


READER = LogReader(is_epoch_csv, _read)

"""The cells in which strategies compete: equal model, batch, dtype and cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from harness.plot.catalog import TrainingCase


def cell_of(case: TrainingCase) -> str:
    """A case's own cell, in words; a run on one device may join others."""
    batch = "" if case.batch is None else f"batch {case.batch:g}"
    words = [case.first.model, batch, case.first.dtype, case.case.cluster]
    return " · ".join(word for word in words if word)


def _first_device(case: TrainingCase) -> tuple[object, ...]:
    """Properties that a run on one device shares with runs on more: workload, host, device kind."""
    ranks = case.case.header.ranks
    device = (ranks[0].hostname, ranks[0].device_kind, ranks[0].n_cores) if ranks else ()
    return (case.first.model, case.batch, case.first.dtype, device)


def cells(cases: Iterable[TrainingCase]) -> dict[str, list[TrainingCase]]:
    """Cases by cell; a run on one device joins every cell whose first device it used."""
    every = list(cases)
    found: dict[str, list[TrainingCase]] = defaultdict(list)
    for case in every:
        if case.case.n_devices > 1:
            found[cell_of(case)].append(case)
    by_device: dict[tuple[object, ...], list[list[TrainingCase]]] = defaultdict(list)
    for own in found.values():
        by_device[_first_device(own[0])].append(own)
    for case in every:
        if case.case.n_devices > 1:
            continue
        for own in by_device.get(_first_device(case)) or [found[cell_of(case)]]:
            own.append(case)
    return dict(found)

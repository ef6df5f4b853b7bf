"""Every measurement of a run with its subject, by which other runs' measurements are compared with
it: the same device or pair of devices, by host; the same collective and size; the same model,
strategy, batch and settings."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from harness.domain.run import device_names, telling_flags
from harness.inputs import one_line
from harness.measure.derive.settings import BETWEEN_STEPS, UNTELLING, is_off, telling_settings
from harness.measure.statistics import Summary
from harness.plot.catalog import batch_of
from harness.plot.numbers import RunNumbers
from harness.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
)

# Settings that change no step, or only the values that it computes.
_WITHOUT_EFFECT = BETWEEN_STEPS.union(UNTELLING, ("seed", "data_dir", "warm_up"))


class Subject(NamedTuple):
    """What a measurement is of.

    Attributes:
        kind: one of KINDS.
        settings: of a training, beyond its name.
    """

    kind: str
    name: str
    settings: str = ""

    def __str__(self) -> str:
        return one_line(f"{self.kind}: {self.name}")


FEWEST = 3
"""Values that give an interval, because two are far apart, or near each other, by chance alone."""


class Timed(NamedTuple):
    """Seconds in one run, or seconds per FLOP or byte: the median and its interval, which has no
    end with fewer than FEWEST samples."""

    median: float
    low: float
    high: float


Measured = tuple[Subject, int, Timed]
"""Subject, size of the message or product, and time of one measurement."""


def _rate(show: Callable[[float], str]) -> Callable[[float], str]:
    return lambda seconds_per_unit: show(1 / seconds_per_unit)


KINDS: dict[str, Callable[[float], str]] = {
    "training": format_duration,
    "link bandwidth": _rate(format_bandwidth),
    "link latency": format_duration,
    "bus bandwidth": _rate(format_bandwidth),
    "matmul": _rate(format_flops),
    "distributed product": _rate(format_flops),
    "memory bandwidth": _rate(format_bandwidth),
}
"""How the seconds of each kind of measurement are printed, in the order of the table."""


def _timed(time: Summary, per: float = 1.0) -> Timed:
    low, high = (time.low, time.high) if time.n >= FEWEST else (0.0, math.inf)
    return Timed(time.median / per, low / per, high / per)


def _of_devices(run: RunNumbers) -> Iterator[Measured]:
    names = device_names(run.header.ranks)
    for product in run.products:
        name = f"{names.get(product.rank, product.hostname)} {product.dtype}"
        flops = 2 * product.m * product.n * product.k
        yield Subject("matmul", name), flops, _timed(product.time, flops)
    for row in run.memory:
        name = f"{names.get(row.rank, row.hostname)} {row.kernel}"
        traffic = row.bytes_per_s * row.time.median
        yield Subject("memory bandwidth", name), row.n_bytes, _timed(row.time, traffic)
    for made in run.distributed:
        name = f"{made.scaling} scaling {made.dtype} on {format_count(made.n_ranks, 'rank')}"
        flops = 2 * made.m * made.n * made.k
        yield Subject("distributed product", name), flops, _timed(made.time, flops)


def _of_links(run: RunNumbers) -> Iterator[Measured]:
    names = device_names(run.header.ranks)
    for matrix in run.links:
        n = len(matrix.names)
        between = {
            (i, j): f"{names.get(i, i)} to {names.get(j, j)} over {matrix.transport}"
            for i in range(n)
            for j in range(n)
        }
        for pair, sent in matrix.transfers.items():
            size = matrix.n_bytes
            yield Subject("link bandwidth", between[pair]), size, _timed(sent, size)
        for i, j in np.argwhere(np.isfinite(matrix.median_latency_s)).tolist():
            # Other work lengthens most round trips, but not the shortest.
            shortest, median = matrix.latency_s[i, j], matrix.median_latency_s[i, j]
            time = Timed(float(shortest), float(shortest), float(median))
            yield Subject("link latency", between[i, j]), 0, time
    for row in run.collectives:
        if row.busbw > 0:  # it is 0 on one rank
            name = f"{row.operation} of {format_bytes(row.n_bytes)} over {row.transport}"
            name += f" on {row.n_ranks} ranks"
            moved = row.busbw * row.time.median
            yield Subject("bus bandwidth", name), row.n_bytes, _timed(row.time, moved)


def trainings_of(runs: Iterable[RunNumbers]) -> dict[int, Subject]:
    """The subject of each training, by the run's id.

    A setting counts only if all runs of a name have it, because a later version has more of them.
    """
    by_name: dict[str, list[RunNumbers]] = defaultdict(list)
    for run in runs:
        if (one := run.summary) is not None:
            batch = batch_of(run, one)
            parts = [f"{one.model} {one.strategy} on {one.n_ranks}", one.dtype]
            parts += [f"batch {batch:g}" if batch else "", "epoch" * (one.unit == "epoch")]
            by_name[" · ".join(filter(None, parts))].append(run)
    subjects = {}
    for name, alike in by_name.items():
        known = set.intersection(*(set(run.header.config) for run in alike)) - _WITHOUT_EFFECT
        configs = [
            {n: value for n, value in config.items() if n in known and not is_off(value)}
            for config in (telling_flags("train", run.header.config) for run in alike)
        ]
        for run, config, words in zip(alike, configs, telling_settings(configs), strict=True):
            own = f"{name} · {words}" if words else name
            subjects[id(run)] = Subject("training", own, json.dumps(config, sort_keys=True))
    return subjects


def times_of(
    runs: Iterable[RunNumbers], trainings: dict[int, Subject]
) -> dict[Subject, dict[int, list[Timed]]]:
    """The times of each run that is ok, by subject and size."""
    found: dict[Subject, dict[int, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.header.status != "ok":
            continue
        for subject, size, time in (*_of_devices(run), *_of_links(run)):
            found[subject][size].append(time)
        if run.summary is not None and run.summary.duration is not None:
            found[trainings[id(run)]][0].append(_timed(run.summary.duration))
    return found

"""Results prepared for figures: repeats brought together, unlike clusters kept apart, labels.

Repeats are runs of one configuration (equal key) on one cluster (equal nodes, devices, cores,
network speed and environment variables) with one status: a case. Every row of `matmul` and `links`
names its product or message, so their runs are repeats whatever else they measured and for how
long. Runs that are not ok are cases of their own, so that they stay in every figure.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

from harness.domain.prediction import Validation, validation_file
from harness.domain.run import HOST_SETTINGS, RunHeader, telling_flags
from harness.errors import HarnessError, ResultsError
from harness.inputs import by_number
from harness.measure.derive.devices import PeakKey, SummaRow, peaks_of, with_efficiency
from harness.measure.derive.doubts import rank_settings
from harness.measure.derive.settings import configured_number, told_within
from harness.measure.derive.training import (
    TrainingSummary,
    add_mfu_of_measured_peak,
    with_outliers_of_repeats,
)
from harness.measure.statistics import Summary, summarize
from harness.measure.store import Found, Problem
from harness.plot.numbers import RunNumbers, derive_numbers
from harness.plot.style import shorten
from harness.units import format_number

MOST = 2
Row = TypeVar("Row")


@contextmanager
def workers() -> Iterator[Executor]:
    """As many as there are cores, at most MOST; they inherit the imports of this process.

    Raises:
        ResultsError: the system ended one of them.
    """
    n = min(MOST, len(os.sched_getaffinity(0)))
    try:
        with ProcessPoolExecutor(n, mp_context=get_context("fork")) as pool:
            yield pool
    except BrokenProcessPool:
        raise ResultsError(
            "a process that read runs was killed, perhaps for memory: draw fewer runs at once"
        ) from None


BRANDS = re.compile(r"\((?:R|TM)\)|\b(?:NVIDIA|GeForce|Intel|CPU|Processor)\b|@.*", re.IGNORECASE)
GIGABIT = 1.2e8  # bytes/s that 1 Gbit/s Ethernet carries
LONGEST_NAME = 60  # letters of a device's kind or a host, in labels
ROWS_NAME_ALL = ("matmul", "links")


@dataclass(frozen=True, kw_only=True)
class RepeatGroup:
    """Repeats of one configuration on one cluster with one status.

    Attributes:
        cluster: the cluster in a few words, unique among the clusters of the catalog.
    """

    workload: str
    cluster: str
    status: str
    runs: tuple[RunNumbers, ...]

    @property
    def header(self) -> RunHeader:
        return self.runs[0].header

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def is_failed_pipeline(self) -> bool:
        """Whether it is not ok, and pipelines were planned."""
        return not self.is_ok and any(run.is_planned_pipeline for run in self.runs)

    @property
    def n_devices(self) -> int:
        return len(self.header.ranks) or self.header.cluster.n_devices

    @property
    def identity(self) -> dict[str, Any]:
        """Begins a table's row."""
        return {"label": self.cluster, "status": self.status, "reason": self.reason}

    @property
    def reason(self) -> str:
        """First line of why it is not ok."""
        return self.header.reason.strip().partition("\n")[0]

    def repeats_of(
        self, rows_of: Callable[[RunNumbers], Iterable[Row]], *names: str
    ) -> dict[Any, list[Row]]:
        """The rows of all runs, together where these attributes are equal."""
        key, groups = attrgetter(*names), defaultdict[Any, list[Row]](list)
        for run in self.runs:
            for row in rows_of(run):
                groups[key(row)].append(row)
        return groups


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """A training case with the numbers of each of its repeats; `label` is unique for its model."""

    case: RepeatGroup
    label: str
    summaries: tuple[TrainingSummary, ...]

    @property
    def first(self) -> TrainingSummary:
        return self.summaries[0]

    @property
    def batch(self) -> float | None:
        return batch_of(self.case.runs[0], self.first)

    @property
    def identity(self) -> dict[str, Any]:
        """Begins a table's row."""
        own = {"model": self.first.model, "label": self.label, "strategy": self.first.strategy}
        return own | {"status": self.case.status, "reason": self.case.reason}

    @property
    def whole_label(self) -> str:
        """Unique for all models."""
        return f"{self.first.model} · {self.label}"

    @property
    def named(self) -> dict[str, Any]:
        """`identity` with the whole label."""
        return self.identity | {"label": self.whole_label}


def short_kind(kind: str) -> str:
    """A device's kind without brands: `NVIDIA GeForce RTX 3070` is `RTX 3070`."""
    kind = shorten(kind, LONGEST_NAME)
    return " ".join(BRANDS.sub(" ", kind).split()) or kind or "device"


def speed_class(bytes_per_s: float | None) -> float | None:
    """Half decades around 1 Gbit/s, which is 0: readings of one link agree, links of two speeds do
    not."""
    return round(2 * math.log10(bytes_per_s / GIGABIT)) / 2 if bytes_per_s else None


def telling_variables(runs: Iterable[RunNumbers]) -> list[str]:
    """Environment variables that differ between runs."""
    found = rank_settings([run.header for run in runs])
    return [name for name, _, differ in found if differ and name not in HOST_SETTINGS]


def cluster_identity(run: RunNumbers, variables: Sequence[str]) -> str:
    """Hash of the properties that are equal for runs on like clusters, and of some variables."""
    nodes = [
        [node.name, [[d.kind, d.speed] for d in node.devices]] for node in run.header.cluster.nodes
    ]
    ranks = [[r.rank, r.hostname, r.device_kind, round(r.n_cores, 2)] for r in run.header.ranks]
    speed = speed_class(run.network_bytes_per_s) if len(nodes) > 1 else None
    values = [
        [r.rank, n, r.settings[n]] for r in run.header.ranks for n in variables if n in r.settings
    ]
    return hashlib.sha256(json.dumps([nodes, ranks, speed, values]).encode()).hexdigest()[:8]


def _cluster_words(run: RunNumbers, variables: Sequence[str]) -> list[str]:
    """Descriptions that grow more exact; the first that tells clusters apart is shown."""
    header = run.header
    kinds = Counter(
        [short_kind(rank.device_kind) for rank in header.ranks]
        or [short_kind(device.kind) for device in header.cluster.devices]
    )
    devices = shorten(" + ".join(f"{n} × {kind}" for kind, n in sorted(kinds.items())), 160)
    nodes = header.cluster.nodes
    speed = run.network_bytes_per_s
    with_network = devices
    if speed and len(nodes) > 1:
        with_network = f"{devices}, {format_number(speed * 8e-9, 2)} Gbit/s"
    own = header.ranks[0].settings if header.ranks else {}
    for name in filter(own.__contains__, variables):
        with_network += f", {shorten(f'{name}={own[name]}', LONGEST_NAME)}"
    first, last = (shorten(node.name, LONGEST_NAME) for node in (nodes[0], nodes[-1]))
    hosts = first if len(nodes) == 1 else f"{first} … {last}"
    exact = f"{with_network} · {hosts}"  # a separator at which long labels break
    return [with_network, exact, f"{exact} [{cluster_identity(run, variables)}]"]


def cluster_labels(runs: Sequence[RunNumbers]) -> dict[int, str]:
    """A label for the cluster of each run, by the run's id: as short as stays unique."""
    variables = telling_variables(runs)
    identities = {id(run): cluster_identity(run, variables) for run in runs}
    firsts: dict[str, RunNumbers] = {}
    for run in runs:
        firsts.setdefault(identities[id(run)], run)
    words = {identity: _cluster_words(run, variables) for identity, run in firsts.items()}
    labels: dict[str, str] = {}
    for level in range(3):
        taken = Counter(w[level] for identity, w in words.items() if identity not in labels)
        for identity, w in words.items():
            if identity not in labels and taken[w[level]] == 1:
                labels[identity] = w[level]
    return {run: labels.get(identity, words[identity][-1]) for run, identity in identities.items()}


def merged(summaries: Sequence[Summary]) -> Summary:
    """One summary of several repeats: the repeat is the unit; a single one keeps its samples."""
    if len(summaries) == 1:
        return summaries[0]
    return summarize([summary.median for summary in summaries])


def batch_of(run: RunNumbers, summary: TrainingSummary) -> float | None:
    """Samples of the job in one step: measured, or as configured where nothing was."""
    if summary.unit == "step" and summary.n_samples:
        return summary.n_samples
    for name, factor in (("global_batch", 1), ("batch", 1), ("batch_per_device", summary.n_ranks)):
        value = configured_number(run, name)
        if value is not None:
            return value * factor
    return None


def _identity(case: TrainingCase) -> tuple[str, ...]:
    """Properties by which cases must differ; figures show the model with the label."""
    return case.first.model, case.label, case.case.status


def _unique_labels(cases: list[TrainingCase]) -> list[TrainingCase]:
    """Extend equal labels of one model and status by the settings that differ."""
    configs = [telling_flags("train", case.case.header.config) for case in cases]
    told = told_within([_identity(case) for case in cases], configs)
    cases = [
        replace(case, label=" · ".join(filter(None, (case.label, words))))
        for case, words in zip(cases, told, strict=True)
    ]
    taken = Counter(_identity(case) for case in cases)
    return [
        case
        if taken[_identity(case)] == 1
        else replace(case, label=f"{case.label} · {case.case.header.run_id}")
        for case in cases
    ]


def read_validations(results: Path) -> tuple[list[Validation], list[Problem]]:
    """Sets that `python -m harness.plan validate --output` wrote; a malformed file is a problem."""
    found: list[Validation] = []
    problems: list[Problem] = []
    for path in sorted(results.glob(validation_file("*"))):
        try:
            found.append(Validation.load(path))
        except HarnessError as error:
            problems.append((path, str(error)))
    return found, problems


def read_catalog(
    found: Sequence[Found], skipped: Sequence[Problem] = (), validations: Sequence[Validation] = ()
) -> Catalog:
    """Derive the numbers of runs one after another; the records of a run are dropped then."""
    runs: list[RunNumbers] = []
    problems = list(skipped)
    with workers() as pool:
        paths, headers = [path for path, _ in found], [header for _, header in found]
        for numbers, of_run in pool.map(derive_numbers, paths, headers, chunksize=4):
            runs.append(numbers)
            problems += of_run
    return Catalog(runs, problems, validations)


class Catalog:
    """The runs of a results directory, by workload and case.

    Attributes:
        skipped: files, lines and numbers that could not be used, as (path, reason).
        validations: published sets, and how well they are predicted.
    """

    def __init__(
        self,
        runs: Sequence[RunNumbers],
        skipped: Sequence[Problem] = (),
        validations: Sequence[Validation] = (),
    ) -> None:
        self.runs, self.validations = list(runs), list(validations)
        self.skipped = list(skipped)
        self._clusters = cluster_labels(self.runs)

    @cached_property
    def peaks(self) -> dict[PeakKey, float]:
        """Measured matmul peaks of all runs: the denominator of MFU of measured peak."""
        return peaks_of((run, run.products) for run in self.runs)

    def distributed(self, run: RunNumbers) -> list[SummaRow]:
        """The run's distributed products against the measured peaks of all runs."""
        return with_efficiency(run.distributed, run.header.ranks, self.peaks)

    def cases(self, workload: str) -> list[RepeatGroup]:
        """Cases of one workload, by cluster and then in order of their first run."""
        groups: dict[tuple[str, str, str], list[RunNumbers]] = defaultdict(list)
        for run in self.runs:
            if run.header.workload == workload:
                cluster, key = self._clusters[id(run)], run.header.key
                if workload in ROWS_NAME_ALL:
                    key = ""
                    cluster += ", in turn" * bool(run.header.config.get("in_turn"))
                groups[cluster, key, run.header.status].append(run)
        cases = [
            RepeatGroup(workload=workload, cluster=cluster, status=status, runs=tuple(runs))
            for (cluster, _, status), runs in groups.items()
        ]
        return sorted(cases, key=lambda case: (case.n_devices, case.cluster))

    @cached_property
    def training(self) -> list[TrainingCase]:
        """Training cases with their numbers, by model, cluster and strategy."""
        cases: list[tuple[tuple[Any, ...], TrainingCase]] = []
        for case in self.cases("train"):
            known = [(run, run.summary) for run in case.runs if run.summary is not None]
            if not known:
                continue
            case = replace(case, runs=tuple(run for run, _ in known))
            summaries = tuple(
                add_mfu_of_measured_peak(own, run.header.ranks, self.peaks) for run, own in known
            )
            summaries = with_outliers_of_repeats(summaries, [run.times for run in case.runs])
            first = summaries[0]
            batch = batch_of(case.runs[0], first)
            words = [first.strategy, f"batch {batch:g}" if batch else "", first.dtype, case.cluster]
            label = " · ".join(word for word in words if word)
            strategy = by_number(first.strategy)
            order = (first.model, case.n_devices, case.cluster, strategy, batch or 0, label)
            cases.append((order, TrainingCase(case=case, label=label, summaries=summaries)))
        return _unique_labels([case for _, case in sorted(cases, key=itemgetter(0))])

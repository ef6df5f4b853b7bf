"""The runs of a launch: their order, repeats and needs, and the runs that are already done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.run import RankInfo, RunHeader, device_names, run_key
from harness.errors import ConfigError
from harness.measure.store import headers_in
from harness.workloads import load_workload
from harness.workloads.common.contract import (
    UNTIL,
    Continuation,
    Need,
    Workload,
    config_json,
    count_ranks,
)

_FINISHED = ("ok", "oom")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a workload with all flags set."""

    name: str
    workload: Workload
    config: Any


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A case with its place among the repeats of the same configuration and cluster.

    Attributes:
        ranks: the ranks of the launch that it uses; rank k of the run is the k-th of them.
    """

    case: Case
    key: str
    repeat: int
    ranks: tuple[int, ...]

    @property
    def title(self) -> str:
        """Workload, model, strategy and the key's part that names the directory, for the log."""
        named = (getattr(self.case.config, name, "") for name in ("model", "strategy"))
        words = (self.case.name, *named, f"({self.key[:6]})")
        return " ".join(word for word in words if word)


def check_files(cases: Sequence[Case]) -> None:
    """Refuse cases whose files are missing or malformed, once for all repeats; rank 0 only.

    Raises:
        HarnessError: names the file.
    """
    checks = {(case.name, case.config): case.workload.check for case in cases}
    for (_, config), check in checks.items():
        check(config)


def describe_cluster(ranks: list[RankInfo]) -> Cluster:
    """Nodes and devices of this launch; the links workload adds the links."""
    names = device_names(ranks)
    by_host: dict[str, list[RankInfo]] = {}
    for info in ranks:
        by_host.setdefault(info.hostname, []).append(info)
    nodes = [
        Node(
            name=hostname,
            devices=[
                Device(
                    name=names[info.rank],
                    kind=info.device_kind,
                    memory_bytes=info.memory_bytes,
                )
                for info in infos
            ],
            nic_bytes_per_s=infos[0].nic_bytes_per_s or None,
        )
        for hostname, infos in by_host.items()
    ]
    return Cluster(nodes=nodes)


def plan_runs(cases: Sequence[Case], ranks: list[RankInfo]) -> list[PlannedRun]:
    """Number the repeats: cases with equal configuration and cluster are repeats of each other."""
    seen: Counter[str] = Counter()
    planned = []
    for case in cases:
        n_ranks = count_ranks(case.config, len(ranks))
        cluster = describe_cluster(ranks[:n_ranks])
        key = run_key(case.name, config_json(case.config), cluster)
        used = tuple(info.rank for info in ranks[:n_ranks])
        planned.append(PlannedRun(case=case, key=key, repeat=seen[key], ranks=used))
        seen[key] += 1
    return planned


def remaining_repeats(
    planned: Sequence[PlannedRun], done: Mapping[str, Sequence[RunHeader]]
) -> list[int | None]:
    """Give each run the lowest free repeat number, or None if it is done."""
    taken = {key: {header.repeat for header in headers} for key, headers in done.items()}
    repeats: list[int | None] = []
    for plan in planned:
        if plan.repeat < len(done.get(plan.key, ())):
            repeats.append(None)
            continue
        others = taken.setdefault(plan.key, set())
        free = next(n for n in count() if n not in others)
        others.add(free)
        repeats.append(free)
    return repeats


def case_of(name: str, config: dict[str, Any]) -> Case:
    """Make a workload's case from its flags as JSON; missing flags get their defaults."""
    workload = load_workload(name)
    return Case(name=name, workload=workload, config=msgspec.convert(config, workload.config))


def continued(case: Case, found: Continuation, n_ranks: int) -> Case:
    """The case by which so many ranks go on."""
    go_on = case.workload.go_on
    assert go_on is not None, "a workload that finds continuations has it"
    return replace(case, config=go_on(case.config, found, n_ranks))


def needs_of(cases: Sequence[Case]) -> list[Need]:
    """Runs that cases build on; needs with needs of their own come last."""
    needs = [need for case in cases for need in case.workload.needs(case.config)]

    def has_needs(need: Need) -> bool:
        case = case_of(need.name, need.config)
        return bool(case.workload.needs(case.config))

    return sorted(needs, key=has_needs)


def adjacent_cases(cases: Sequence[Case]) -> Iterator[list[int]]:
    """Yield the positions of each group of adjacent cases of one workload."""
    for _, positions in groupby(range(len(cases)), key=lambda position: cases[position].name):
        yield list(positions)


def find_last(results: Path, case: Case, repeat: int, n_started: int) -> RunHeader | None:
    """The newest run of a case, or the one by which it went on; None if there is none.

    Of trainings that are the same, one whose other flags are the same comes first.
    A run of another number of ranks counts only if it had more than this launch has started, so
    that a sweep over numbers of ranks continues each run by itself.
    """
    workload = case.workload
    if workload.is_same is None:
        return None
    config = config_json(case.config)
    known = {header.run_id: header for _, header in headers_in(results)}
    found: list[tuple[int, str, RunHeader]] = []
    for header in known.values():
        first, later = header, {header.run_id}
        while (earlier := known.get(str(first.config.get("continues", "")))) is not None:
            if earlier.run_id in later:  # a damaged file
                break
            first = earlier
            later.add(first.run_id)
        n_ranks = len(first.ranks)
        is_repeat = (first.workload, first.repeat) == (case.name, repeat)
        has_ranks = n_ranks == count_ranks(case.config, n_started) or n_ranks > n_started
        if is_repeat and has_ranks and workload.is_same(config, first.config):
            n_equal = sum(first.config.get(n) == v for n, v in config.items() if n != "n_ranks")
            found.append((n_equal, header.start_utc, header))
    return max(found, key=lambda one: one[:2])[2] if found else None


def is_whole(header: RunHeader) -> bool:
    """Whether a run has trained to its last step, so that nothing goes on from it."""
    return header.status == "ok" and UNTIL not in header.summary


def check_batches(planned: Sequence[PlannedRun], results: Path, n_started: int) -> None:
    """Refuse to begin a run again only because its global batch follows from the number of ranks;
    rank 0 only.

    Raises:
        ConfigError: a run of more ranks and as many samples a rank could go on.
    """
    counts = sorted({len(header.ranks) for _, header in headers_in(results)})
    for plan in planned:
        case, n_ranks, find = plan.case, len(plan.ranks), plan.case.workload.find_continuation
        if find is None or find_last(results, case, plan.repeat, n_started) is not None:
            continue
        for n in (n for n in counts if n > n_started):
            batch = case.config.batch * n // n_ranks
            other = replace(case, config=replace(case.config, batch=batch, n_ranks=n))
            last = find_last(results, other, plan.repeat, n)
            if last is None or is_whole(last):
                continue
            if found := find(other.config, results / last.run_id, ()):
                raise ConfigError(
                    f"--resume: {last.run_id} trains global batches of {batch} on {n} ranks, this "
                    f"launch would begin again with {case.config.batch} on {n_ranks}: give "
                    f"--batch-size {batch} to go on from step {found.step}, or drop --resume"
                )


def has_failed(headers: Sequence[RunHeader]) -> bool:
    """Whether a run failed; one that ranks were lost from has not if the run that goes on is ok."""
    gone_on = {header.config.get("continues") for header in headers}
    return any(h.status not in _FINISHED and h.run_id not in gone_on for h in headers)


def finished_repeats(results: Path) -> dict[str, list[RunHeader]]:
    """Finished runs in a results directory by key, oldest first."""
    done: dict[str, list[RunHeader]] = {}
    for _, header in headers_in(results):
        if header.status in _FINISHED:
            done.setdefault(header.key, []).append(header)
    for repeats in done.values():
        repeats.sort(key=lambda header: header.start_utc)
    return done

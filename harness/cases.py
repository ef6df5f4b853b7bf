"""The runs of a launch: their order, repeats and needs, and the runs that are already done."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.run import RankInfo, RunHeader, device_names, run_key
from harness.errors import ConfigError, ModelError
from harness.measure.places import check_results
from harness.measure.store import headers_in
from harness.runtime.models.user_code import UserFunction
from harness.runtime.ranks.sharing import Fetch, fetch_nothing
from harness.workloads import load_workload
from harness.workloads.common.contract import (
    UNTIL,
    Continuation,
    Need,
    Workload,
    config_json,
    count_ranks,
)

_log = logging.getLogger(__name__)

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
        swept: the flags that tell it from others of its workload and strategy.
    """

    case: Case
    key: str
    repeat: int
    ranks: tuple[int, ...]
    swept: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Workload, model, strategy, swept flags and the key's part that names the directory, for
        the log."""
        config = self.case.config
        named = [getattr(config, name, "") for name in ("model", "strategy")]
        named += [f"{name} {getattr(config, name)}" for name in self.swept if name != "model"]
        words = (self.case.name, *named, f"({self.key[:6]})")
        return " ".join(word for word in words if word)


def state_of(case: Case) -> Path | None:
    """The directory of the saved state from which a case starts."""
    state: Path | None = getattr(case.config, "load_state", None)
    return state and state.absolute()


def check_files(cases: Sequence[Case], results: Path, fetch: Fetch = fetch_nothing) -> None:
    """Refuse cases whose files or models are missing or malformed, once for all repeats; rank 0
    only.

    Raises:
        HarnessError: names the file or the model.
    """
    for factory in _factories(cases):
        factory.find()
    for state in filter(None, map(state_of, cases)):
        fetch(state)
    checks = {(case.name, case.config): case.workload.check for case in cases}
    for (_, config), check in checks.items():
        check(config, results)


def check_dry_run(cases: Sequence[Case], results: Path) -> None:
    """Refuse the cases that a launch refuses before its first run, and a user's model that cannot
    be imported.

    Raises:
        HarnessError: names the directory, the file or the model.
    """
    check_results(results, platform.node(), is_dry=True)
    check_files(cases, results)
    for factory in _factories(cases):
        factory.check()


def _factories(cases: Sequence[Case]) -> list[UserFunction]:
    """The users' own models."""
    names = dict.fromkeys(getattr(case.config, "model", "") for case in cases)
    return [UserFunction(name, "--model", ModelError) for name in names if ":" in name]


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
                    memory_bytes=info.training_bytes,
                )
                for info in infos
            ],
            nic_bytes_per_s=infos[0].nic_bytes_per_s or None,
        )
        for hostname, infos in by_host.items()
    ]
    return Cluster(nodes=nodes)


def swept_flags(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """For each case the names of the flags by which cases of its workload and strategy differ."""

    def kind(case: Case) -> tuple[str, str]:
        return case.name, getattr(case.config, "strategy", "")

    values: dict[tuple[str, str], dict[str, set[str]]] = {}
    for case in cases:
        for name, value in vars(case.config).items():
            values.setdefault(kind(case), {}).setdefault(name, set()).add(repr(value))
    told = {
        of_kind: tuple(name for name, found in flags.items() if len(found) > 1)
        for of_kind, flags in values.items()
    }
    return [told.get(kind(case), ()) for case in cases]


def plan_runs(cases: Sequence[Case], ranks: list[RankInfo]) -> list[PlannedRun]:
    """Number the repeats: cases with equal configuration and cluster are repeats of each other."""
    seen: Counter[str] = Counter()
    planned = []
    for case, swept in zip(cases, swept_flags(cases), strict=True):
        n_ranks = count_ranks(case.config, len(ranks))
        cluster = describe_cluster(ranks[:n_ranks])
        key = run_key(case.name, config_json(case.config), cluster)
        used = tuple(info.rank for info in ranks[:n_ranks])
        run = PlannedRun(case=case, key=key, repeat=seen[key], ranks=used, swept=swept)
        planned.append(run)
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


def needs_of(cases: Sequence[Case]) -> list[Need]:
    """Runs that cases build on; needs with needs of their own come last."""
    needs = [need for case in cases for need in case.workload.needs(case.config)]

    def has_needs(need: Need) -> bool:
        case = case_of(need.name, need.config)
        return bool(case.workload.needs(case.config))

    return sorted(needs, key=has_needs)


def adjacent_cases(cases: Sequence[Case]) -> list[list[int]]:
    """The positions of each group of adjacent cases of one workload."""
    groups = groupby(range(len(cases)), key=lambda position: cases[position].name)
    return [list(positions) for _, positions in groups]


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The last run of a training, from which a planned run goes on, or why it does not.

    Attributes:
        unlike: flags by which the planned run differs, each with its own value and the earlier one.
        refusal: what to do instead, if the planned run begins again; empty if it goes on.
    """

    header: RunHeader
    unlike: dict[str, tuple[Any, Any]]
    refusal: str

    def text(self, found: Continuation) -> str:
        """One line of what happens to the state that the earlier run has saved."""
        words = [f"{name} {own} instead of {other}" for name, (own, other) in self.unlike.items()]
        unlike = f", with {', '.join(words)}" if words else ""
        if not self.refusal:
            return f"the ranks of {self.header.run_id} {found.text}{unlike}"
        return (
            f"begins again, not from step {found.step} of {self.header.run_id}{unlike}: "
            f"{self.refusal}"
        )


# How far a planned run is from an earlier one: as on other ranks, by another strategy, or further.
_SAME, _RANKS, _STRATEGY, _OTHER = range(4)


def find_earlier(
    results: Path, plan: PlannedRun, planned: Sequence[PlannedRun], n_started: int
) -> list[Earlier]:
    """The last runs of a planned run's training, the nearest first, and of these the newest.

    Of trainings that are the same, one whose other flags are the same comes first. A run of other
    ranks or by another strategy counts if it is unfinished and if no other run of the launch is
    nearer to it; if another is as near, neither goes on.
    """
    workload, config = plan.case.workload, config_json(plan.case.config)
    if workload.differing is None:
        return []
    others = {other.case.config: other for other in planned if other.case.name == plan.case.name}
    others.pop(plan.case.config, None)
    found: list[tuple[tuple[int, int, str], Earlier]] = []
    for header, first in _last_runs(results, workload):
        if (first.workload, first.repeat) != (plan.case.name, plan.repeat):
            continue
        distance, unlike = _compare(plan, first)
        has_ended = is_whole(header) and not (distance == _RANKS and len(first.ranks) > n_started)
        if distance > _OTHER or (distance > _SAME and has_ended):
            continue
        nearest = min((_compare(one, first)[0] for one in others.values()), default=distance + 1)
        if nearest < distance:
            continue
        refusal = ""
        if distance == _OTHER:
            unlike = {name: unlike[name] for name in unlike.keys() - workload.strategy_flags}
            refusal = "give the same to go on"
        elif nearest == distance:
            refusal = "other runs of this launch could go on as well, start one of them alone"
        n_equal = sum(first.config.get(n) == v for n, v in config.items() if n != "n_ranks")
        place = (-distance, 0 if distance else n_equal, header.start_utc)
        found.append((place, Earlier(header=header, unlike=unlike, refusal=refusal)))
    return [last for _, last in sorted(found, key=lambda one: one[0], reverse=True)]


def _last_runs(results: Path, workload: Workload) -> Iterator[tuple[RunHeader, RunHeader]]:
    """Runs that none continues, each with the first that it continues with the same strategy."""
    assert workload.differing is not None, "others were refused"
    known = {header.run_id: header for _, header in headers_in(results)}
    continued = {header.config.get("continues") for header in known.values()}
    for last in known.values():
        if last.run_id in continued:
            continue
        first, seen = last, {last.run_id}
        while (earlier := known.get(str(first.config.get("continues", "")))) is not None:
            differing = workload.differing(first.config, earlier.config)
            if differing & workload.strategy_flags or earlier.run_id in seen:  # a damaged file
                break
            first = earlier
            seen.add(first.run_id)
        yield last, first


def _compare(plan: PlannedRun, first: RunHeader) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """How far a planned run is from an earlier one, and the flags by which they differ."""
    workload, config = plan.case.workload, config_json(plan.case.config)
    assert workload.differing is not None, "others were refused"
    names = workload.differing(config, first.config)
    unlike = {name: (config.get(name), first.config.get(name)) for name in sorted(names)}
    n_others = len(names - workload.strategy_flags)
    distance = _SAME if not names else _STRATEGY if not n_others else _OTHER + n_others - 1
    if len(plan.ranks) != len(first.ranks):
        unlike["n_ranks"] = (len(plan.ranks), len(first.ranks))
        distance = max(distance, _RANKS)
    return distance, unlike


def is_whole(header: RunHeader) -> bool:
    """Whether a run has trained to its last step, so that nothing goes on from it."""
    return header.status == "ok" and UNTIL not in header.summary


def find_resumed(
    results: Path,
    plan: PlannedRun,
    planned: Sequence[PlannedRun],
    n_started: int,
    fetch: Fetch = fetch_nothing,
) -> RunHeader | Continuation | None:
    """The run by which other ranks have ended a planned one, or how it goes on; None if it begins.

    Logs a line about an earlier run whose state is loaded, or could be; rank 0 only.
    """
    find = plan.case.workload.find_continuation
    if find is None:
        return None
    for last in find_earlier(results, plan, planned, n_started):
        if is_whole(last.header):
            return last.header if last.header.config.get("continues") else None
        if found := find(plan.case.config, results / last.header.run_id, (), fetch):
            _log.info("%s: %s", plan.title, last.text(found))
            return None if last.refusal else found
    return None


def check_batches(
    planned: Sequence[PlannedRun], results: Path, n_started: int, fetch: Fetch = fetch_nothing
) -> None:
    """Refuse to begin a run again only because its global batch follows from the number of ranks;
    rank 0 only.

    Raises:
        ConfigError: a run of more ranks and as many samples a rank could go on.
    """
    counts = {len(header.ranks) for _, header in headers_in(results)}
    larger = sorted(n for n in counts if n > n_started)
    for plan in planned if larger else ():
        case, n_ranks, find = plan.case, len(plan.ranks), plan.case.workload.find_continuation
        if find is None:
            continue
        if any(not last.refusal for last in find_earlier(results, plan, planned, n_started)):
            continue
        for n in larger:
            batch = case.config.batch * n // n_ranks
            other = replace(case, config=replace(case.config, batch=batch, n_ranks=n))
            like = replace(plan, case=other, ranks=tuple(range(n)))
            last = next(iter(find_earlier(results, like, [], n)), None)
            if last is None or last.unlike or is_whole(last.header):
                continue
            if found := find(other.config, results / last.header.run_id, (), fetch):
                raise ConfigError(
                    f"--resume: {last.header.run_id} trains global batches of {batch} on {n} "
                    f"ranks, this launch would begin again with {case.config.batch} on {n_ranks}: "
                    f"give --batch-size {batch} to go on from step {found.step}, or drop --resume"
                )


def check_ended(
    planned: Sequence[PlannedRun], results: Path, n_started: int, fetch: Fetch = fetch_nothing
) -> None:
    """Refuse to go on from a run that another launch still trains; rank 0 only.

    Raises:
        ConfigError: names the run.
    """
    for plan in planned:
        config, find = plan.case.config, plan.case.workload.find_continuation
        earlier = find_earlier(results, plan, planned, n_started)
        if find is None or all(last.header.status != "running" for last in earlier):
            continue
        for last in earlier:  # as `find_resumed` does
            run_id, status = last.header.run_id, last.header.status
            found = find(config, results / run_id, (), fetch)
            if found is None and not is_whole(last.header):
                continue
            if found is not None and status == "running" and not last.refusal:
                raise ConfigError(
                    f"--resume: another launch still trains {run_id}, or its host was lost within "
                    f"half a minute, and this one would go on from step {found.step}: wait until "
                    "that one has ended, or end it"
                )
            break


def has_failed(headers: Sequence[RunHeader]) -> bool:
    """Whether a run failed; one that ranks were lost from has not if the run that goes on is ok."""
    gone_on = {header.config.get("continues") for header in headers}
    return any(h.status not in _FINISHED and h.run_id not in gone_on for h in headers)


def finished_repeats(results: Path) -> dict[str, list[RunHeader]]:
    """Finished runs in a results directory by key, oldest first."""
    done: dict[str, list[RunHeader]] = {}
    headers = sorted((header for _, header in headers_in(results)), key=lambda one: one.start_utc)
    for header in headers:
        if header.status in _FINISHED:
            done.setdefault(header.repeat_key, []).append(header)
    return done

"""The runs of a launch: their order, repeats and needs, and those that are already done."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.run import HOST_SETTINGS, RankInfo, RunHeader, device_names, run_key
from harness.errors import EXIT_CODE, ModelError, ResultsError
from harness.measure.heartbeat import HEADER_FILE, HEARTBEAT_FILE
from harness.measure.places import check_results
from harness.measure.store import read_header
from harness.runtime.models.user_code import UserFunction
from harness.runtime.ranks.control import Control
from harness.runtime.ranks.sharing import Fetch, fetch_nothing
from harness.workloads import load_workload
from harness.workloads.common.contract import Need, Workload, config_json

_log = logging.getLogger(__name__)


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


def unlike_code(cases: Sequence[Case], hostnames: Sequence[str], control: Control) -> str:
    """The error if users' own code is not the same on all ranks, which must call this; empty if it
    is."""
    own = [case.config for case in cases if getattr(case.config, "code_digest", "")]
    mine = {f"--model {config.model} --data {config.data}": config.code_digest for config in own}
    codes = control.gather("code", mine, dict[str, str])
    for rank, code in enumerate(codes):
        for flags in code.keys() | codes[0].keys():
            if code.get(flags) != codes[0].get(flags):
                return (
                    f"{flags}: rank 0 on {hostnames[0]} and rank {rank} on {hostnames[rank]} have "
                    "different code of it, which all ranks must share: copy its files to all nodes"
                )
    return ""


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
        # Of a case for fewer ranks the first ones, and the others wait, so that one launch can
        # sweep over numbers of ranks.
        n_ranks = min(getattr(case.config, "n_ranks", None) or len(ranks), len(ranks))
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


def _is_finished(header: RunHeader) -> bool:
    """Whether a run needs no other launch; one that saves states goes on if memory was short."""
    return header.status == "ok" or (header.status == "oom" and not header.config.get("save_every"))


def exit_code(headers: Sequence[RunHeader]) -> int:
    """That of a launch: 0 if no run failed, `EXIT_CODE` if another launch would fail likewise, else
    1. A run that ranks were lost from has not failed if the run that goes on is ok."""
    gone_on = {header.config.get("continues") for header in headers}
    failed = {h.status for h in headers if not _is_finished(h) and h.run_id not in gone_on}
    return EXIT_CODE if failed == {"invalid"} else int(bool(failed))


def finished_repeats(results: Path, ranks: Sequence[RankInfo] = ()) -> dict[str, list[RunHeader]]:
    """Finished runs in a results directory by key, oldest first; warns of runs that it cannot
    read. A copy of a run is no repeat of it, nor is a run of other environment variables than those
    of the ranks."""
    headers: dict[str, RunHeader] = {}
    for path in results.glob(f"*/{HEADER_FILE}"):
        try:
            header = read_header(path.parent)
            headers[header.run_id] = header
        except ResultsError as error:
            _log.warning("--resume passes over a run: %s", error)
    done: dict[str, list[RunHeader]] = {}
    for header in sorted(headers.values(), key=lambda header: header.start_utc):
        if _is_finished(header) and _has_variables(header, ranks):
            done.setdefault(header.key, []).append(header)
    return done


def _has_variables(header: RunHeader, ranks: Sequence[RankInfo]) -> bool:
    """Whether a run's ranks had the same environment variables, as far as both are known."""
    known = [(a.settings, b.settings) for a, b in zip(header.ranks, ranks, strict=False)]
    differing = {name for a, b in known if a and b for name, _ in a.items() ^ b.items()}
    return differing <= set(HOST_SETTINGS)


def warn_of_other_launch(results: Path, ranks: Sequence[RankInfo]) -> None:
    """Warn of each run that another launch carries out on hosts of these ranks, as far as the
    results directory shows it."""
    own = {info.hostname for info in ranks}
    for path in sorted(results.glob(f"*/{HEARTBEAT_FILE}")):
        with contextlib.suppress(ResultsError):
            header = read_header(path.parent)
            shared = sorted(own & {info.hostname for info in header.ranks})
            if shared and header.status == "running":
                _log.warning(
                    "another launch measures on %s now (%s), and each disturbs the results "
                    "of the other: end one, and measure again what has run beside it",
                    ", ".join(shared),
                    header.run_id,
                )

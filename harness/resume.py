"""The earlier runs from which a launch with --resume goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.cases import PlannedRun
from harness.domain.run import RunHeader
from harness.errors import ConfigError
from harness.measure.store import headers_in
from harness.runtime.ranks.sharing import Fetch, fetch_nothing
from harness.workloads.common.contract import UNTIL, Continuation, Continuing, config_json

_log = logging.getLogger(__name__)


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


# How far a planned run is from an earlier one: as on other ranks, by edited code of users, there
# too, by another strategy, or further.
_SAME, _RANKS, _CODE, _CODE_AND_RANKS, _STRATEGY, _OTHER = range(6)


def find_earlier(
    results: Path, plan: PlannedRun, planned: Sequence[PlannedRun], n_started: int
) -> list[Earlier]:
    """The last runs of a planned run's training, the nearest first, and of these the newest.

    Of trainings that are the same, one whose other flags are the same comes first. A run of other
    ranks or by another strategy counts if it is unfinished and if no other run of the launch is
    nearer to it; if another is as near, neither goes on.
    """
    continuing, config = plan.case.workload.continuing, config_json(plan.case.config)
    if continuing is None:
        return []
    others = {other.case.config: other for other in planned if other.case.name == plan.case.name}
    others.pop(plan.case.config, None)
    found: list[tuple[tuple[int, int, str], Earlier]] = []
    for header, first in _last_runs(results, continuing):
        if (first.workload, first.repeat) != (plan.case.name, plan.repeat):
            continue
        distance, unlike = _compare(plan, first, continuing)
        has_ended = is_whole(header) and not (distance == _RANKS and len(first.ranks) > n_started)
        if distance > _OTHER or (distance > _SAME and has_ended):
            continue
        distances = (_compare(one, first, continuing)[0] for one in others.values())
        nearest = min(distances, default=distance + 1)
        if nearest < distance:
            continue
        refusal = ""
        if distance == _OTHER:
            unlike = {name: unlike[name] for name in unlike.keys() - continuing.strategy_flags}
            refusal = "give the same to go on"
        elif nearest == distance:
            refusal = "other runs of this launch could go on as well, start one of them alone"
        n_equal = sum(first.config.get(n) == v for n, v in config.items() if n != "n_ranks")
        place = (-distance, 0 if distance else n_equal, header.start_utc)
        found.append((place, Earlier(header=header, unlike=unlike, refusal=refusal)))
    return [last for _, last in sorted(found, key=lambda one: one[0], reverse=True)]


def _last_runs(results: Path, continuing: Continuing) -> Iterator[tuple[RunHeader, RunHeader]]:
    """Runs that none continues, each with the first that it continues with the same strategy."""
    known = {header.run_id: header for _, header in headers_in(results)}
    continued = {header.config.get("continues") for header in known.values()}
    for last in known.values():
        if last.run_id in continued:
            continue
        first, seen = last, {last.run_id}
        while (earlier := known.get(str(first.config.get("continues", "")))) is not None:
            differing = continuing.differing(first.config, earlier.config)
            if differing & continuing.strategy_flags or earlier.run_id in seen:  # a damaged file
                break
            first = earlier
            seen.add(first.run_id)
        yield last, first


def _compare(
    plan: PlannedRun, first: RunHeader, continuing: Continuing
) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """How far a planned run is from an earlier one, and the flags by which they differ."""
    config = config_json(plan.case.config)
    names = continuing.differing(config, first.config)
    unlike = {name: (config.get(name), first.config.get(name)) for name in sorted(names)}
    distance = _SAME if not names else _CODE if names == {"code_digest"} else _STRATEGY
    if n_others := len(names - continuing.strategy_flags):
        distance = _OTHER + n_others - 1
    if len(plan.ranks) != len(first.ranks):
        unlike["n_ranks"] = (len(plan.ranks), len(first.ranks))
        distance += distance in (_SAME, _CODE)
    return distance, unlike


def is_whole(header: RunHeader) -> bool:
    """Whether a run has trained to its last step, so that nothing goes on from it."""
    return header.status == "ok" and UNTIL not in header.summary


def _first_resumable(
    results: Path, plan: PlannedRun, earlier: Sequence[Earlier], fetch: Fetch
) -> tuple[Earlier, Continuation | None] | None:
    """The first of some earlier runs that has trained to its last step, or whose state can be
    loaded, with its continuation; None if there is none."""
    for last in earlier:
        if is_whole(last.header):
            return last, None
        continuing = plan.case.workload.continuing
        assert continuing is not None, "it has compared these runs"
        if found := continuing.find(plan.case.config, results / last.header.run_id, (), fetch):
            return last, found
    return None


def find_resumed(
    results: Path,
    plan: PlannedRun,
    planned: Sequence[PlannedRun],
    n_started: int,
    fetch: Fetch = fetch_nothing,
) -> RunHeader | Continuation | None:
    """The run by which other ranks have ended a planned one, or how it goes on; None if it begins.

    Logs a line about an earlier run that has ended it, or whose state is loaded, or could be; rank
    0 only.
    """
    earlier = find_earlier(results, plan, planned, n_started)
    resumable = _first_resumable(results, plan, earlier, fetch)
    if resumable is None:
        return None
    last, found = resumable
    if found is None:
        if not last.header.config.get("continues"):
            return None
        hosts = ", ".join(dict.fromkeys(info.hostname for info in last.header.ranks))
        _log.info("%s: done, by %s on %s", plan.title, last.header.run_id, hosts)
        return last.header
    _log.info("%s: %s", plan.title, last.text(found))
    return None if last.refusal else found


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
        case, n_ranks, continuing = plan.case, len(plan.ranks), plan.case.workload.continuing
        if continuing is None:
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
            if found := continuing.find(other.config, results / last.header.run_id, (), fetch):
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
        earlier = find_earlier(results, plan, planned, n_started)
        if all(last.header.status != "running" for last in earlier):
            continue
        resumable = _first_resumable(results, plan, earlier, fetch)
        if resumable is None:
            continue
        last, found = resumable
        if found is not None and last.header.status == "running" and not last.refusal:
            raise ConfigError(
                f"--resume: another launch still trains {last.header.run_id}, or its host was lost "
                f"within half a minute, and this one would go on from step {found.step}: wait "
                "until that one has ended, or end it"
            )

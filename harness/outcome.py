"""How a run ended on each rank, and the status of the run derived from all ranks."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.domain.run import Status
from harness.measure.reached import PHASES, Standstill

# The worst status of a rank becomes that of the run; `skipped` follows from another's failure.
_SEVERITY: list[Status] = ["ok", "skipped", "crash", "timeout", "invalid", "oom"]
# Statuses that another rank may have caused.
_WAITED = ("skipped", "timeout")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended on one rank.

    Attributes:
        peers: ranks that the failed rank waited for; one of them did not answer.
        standstill: the point at which the rank was stuck, if it made no progress.
        is_explained: the rank raised the exception in `reason` itself; no peer caused it.
    """

    status: Status
    reason: str = ""
    peers: tuple[int, ...] = ()
    is_explained: bool = False
    standstill: Standstill | None = None
    summary: dict[str, Any] = {}


def worst(outcomes: list[Outcome], hostnames: list[str]) -> tuple[Status, str]:
    """Return the run's status and the reason, with the rank and host that most likely caused it.

    A rank with its own failure comes before ranks that waited for others. Of the waiting ranks,
    one that waited for a rank which itself waited for none comes first. The reason of a second
    failed rank is added if it differs, because a rank that dies silently leaves the explanation
    to its peers; it is left out if the first rank raised an exception and the second only waited.
    If all failed ranks waited, a stopped rank comes first, or the one behind all others.
    """
    severities = [_SEVERITY.index(outcome.status) for outcome in outcomes]
    status = outcomes[severities.index(max(severities))].status
    if status == "ok":
        return status, ""
    failed = [rank for rank, severity in enumerate(severities) if severity == max(severities)]
    waited = {rank for rank in failed if outcomes[rank].peers}
    silent = {peer for rank in waited for peer in outcomes[rank].peers} - waited

    def distance(rank: int) -> int:
        return 0 if rank not in waited else 1 if silent.intersection(outcomes[rank].peers) else 2

    rank, *others = sorted(failed, key=distance)
    if outcomes[rank].is_explained:
        others = [other for other in others if not outcomes[other].peers]
    first, *rest = _reason(outcomes, hostnames, rank).splitlines()
    for other in others:
        if _first_line(outcomes[other]) != _first_line(outcomes[rank]):
            first += f"; {_reason(outcomes, hostnames, other).splitlines()[0]}"
            break
    stuck = _stuck_rank(outcomes, failed, waited)
    if stuck is not None:
        found = outcomes[stuck].standstill
        assert found is not None
        first = f"rank {stuck} ({hostnames[stuck]}): {found.text}; {first}"
    elif rank in waited and silent:
        names = ", ".join(f"{one} ({hostnames[one]})" for one in sorted(silent))
        first += f"; no answer came from rank {names}"
    return "crash" if status == "skipped" else status, "\n".join([first, *rest])


def _stuck_rank(outcomes: list[Outcome], failed: list[int], waited: set[int]) -> int | None:
    """Find the rank that the others waited for, by progress.

    None if a rank failed by itself, or if no single rank is behind all others. A rank that
    computes counts as behind one that waits in a collective.
    """
    if any(rank not in waited and outcomes[rank].status not in _WAITED for rank in failed):
        return None
    standstills = {
        rank: outcome.standstill
        for rank, outcome in enumerate(outcomes)
        if outcome.standstill is not None and outcome.status != "ok"
    }
    stopped = [rank for rank, standstill in standstills.items() if standstill.is_stopped]
    if stopped:
        return stopped[0]
    order = sorted(standstills, key=lambda rank: _progress(standstills[rank]))
    if len(order) > 1 and _progress(standstills[order[0]]) < _progress(standstills[order[1]]):
        return order[0]
    return None


def _progress(standstill: Standstill) -> tuple[bool, int, int]:
    """Sort key of progress: computing before waiting, then by step and phase."""
    step = -1 << 40 if standstill.step is None else standstill.step
    return standstill.is_waiting, step, PHASES.index(standstill.phase)


def _reason(outcomes: list[Outcome], hostnames: list[str], rank: int) -> str:
    return f"rank {rank} ({hostnames[rank]}): {outcomes[rank].reason}"


def _first_line(outcome: Outcome) -> str:
    return outcome.reason.partition("\n")[0]

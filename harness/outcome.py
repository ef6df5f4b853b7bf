"""How a rank's part of a run ended, and what all parts make of the run."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.domain.run import Status
from harness.measure.reached import PHASES, Standstill

# The worst part of a run decides; one that failed because another had decides least.
_SEVERITY: list[Status] = ["ok", "skipped", "crash", "timeout", "invalid", "oom"]
# Of a rank with one of these another one may be the cause.
_WAITED = ("skipped", "timeout")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's part of a run ended.

    Attributes:
        peers: ranks of which one did not answer, where that is the reason.
        standstill: where the rank was stuck when its part ended, if it was.
        is_explained: the rank raised the exception that the reason gives, and no peer caused it.
    """

    status: Status
    reason: str = ""
    peers: tuple[int, ...] = ()
    is_explained: bool = False
    standstill: Standstill | None = None
    summary: dict[str, Any] = {}


def worst(outcomes: list[Outcome], hostnames: list[str]) -> tuple[Status, str]:
    """The status of the run, and why, naming the rank and host that decided.

    A rank with a reason of its own comes before those that waited for another, of which the one
    next to the trouble comes first: it waited for a rank that waited for nobody. A second rank
    that failed as badly for another reason is heard too: when one dies without a word, it is the
    other that knows what it was waiting for. After an exception, what others waited for says
    nothing new. Where nobody has a reason of its own, the rank that stopped making progress comes
    first: the one that is stopped, else the one that was behind the others.
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
        if _gist(outcomes[other]) != _gist(outcomes[rank]):
            first += f"; {_reason(outcomes, hostnames, other).splitlines()[0]}"
            break
    stuck = _stuck(outcomes, failed, waited)
    if stuck is not None:
        found = outcomes[stuck].standstill
        assert found is not None
        first = f"rank {stuck} ({hostnames[stuck]}): {found.text}; {first}"
    elif rank in waited and silent:
        names = ", ".join(f"{one} ({hostnames[one]})" for one in sorted(silent))
        first += f"; no answer came from rank {names}"
    return "crash" if status == "skipped" else status, "\n".join([first, *rest])


def _stuck(outcomes: list[Outcome], failed: list[int], waited: set[int]) -> int | None:
    """The rank that the others waited for, if progress tells it from them.

    None where a rank has a reason of its own. A rank that waits in a collective is no further than
    one that computes in the same phase, so that only what is behind all others counts.
    """
    if any(rank not in waited and outcomes[rank].status not in _WAITED for rank in failed):
        return None
    places = {
        rank: outcome.standstill
        for rank, outcome in enumerate(outcomes)
        if outcome.standstill is not None and outcome.status != "ok"
    }
    stopped = [rank for rank, place in places.items() if place.is_stopped]
    if stopped:
        return stopped[0]
    ahead = sorted(places, key=lambda rank: _place(places[rank]))
    if len(ahead) > 1 and _place(places[ahead[0]]) < _place(places[ahead[1]]):
        return ahead[0]
    return None


def _place(standstill: Standstill) -> tuple[bool, int, int]:
    """Orders ranks: those that compute before those that wait, then by step and phase."""
    step = -1 << 40 if standstill.step is None else standstill.step
    return standstill.is_waiting, step, PHASES.index(standstill.phase)


def _reason(outcomes: list[Outcome], hostnames: list[str], rank: int) -> str:
    return f"rank {rank} ({hostnames[rank]}): {outcomes[rank].reason}"


def _gist(outcome: Outcome) -> str:
    return outcome.reason.partition("\n")[0]

"""How a rank's part of a run ended, and what all parts make of the run."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.domain.run import Status

# The worst part of a run decides; one that failed because another had decides least.
_SEVERITY: list[Status] = ["ok", "skipped", "crash", "timeout", "invalid", "oom"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's part of a run ended.

    Attributes:
        peers: ranks of which one did not answer, where that is the reason.
        is_explained: the rank raised the exception that the reason gives, and no peer caused it.
    """

    status: Status
    reason: str = ""
    peers: tuple[int, ...] = ()
    is_explained: bool = False
    summary: dict[str, Any] = {}


def worst(outcomes: list[Outcome], hostnames: list[str]) -> tuple[Status, str]:
    """The status of the run, and why, naming the rank and host that decided.

    A rank with a reason of its own comes before those that waited for another, of which the one
    next to the trouble comes first: it waited for a rank that waited for nobody. A second rank
    that failed as badly for another reason is heard too: when one dies without a word, it is the
    other that knows what it was waiting for. After an exception, what others waited for says
    nothing new.
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
    if rank in waited and silent:
        names = ", ".join(f"{one} ({hostnames[one]})" for one in sorted(silent))
        first += f"; no answer came from rank {names}"
    return "crash" if status == "skipped" else status, "\n".join([first, *rest])


def _reason(outcomes: list[Outcome], hostnames: list[str], rank: int) -> str:
    return f"rank {rank} ({hostnames[rank]}): {outcomes[rank].reason}"


def _gist(outcome: Outcome) -> str:
    return outcome.reason.partition("\n")[0]

"""What a check says about a host: a status, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Status(IntEnum):
    """The value is the exit code, as monitoring systems of the Nagios family expect it."""

    OK = 0
    WARN = 1
    CRITICAL = 2
    UNKNOWN = 3


# Not by value: a failure that is certain outweighs one that could not be looked at.
_SEVERITY = [Status.OK, Status.WARN, Status.UNKNOWN, Status.CRITICAL]


@dataclass(frozen=True)
class Finding:
    """One statement of one check about one host.

    Attributes:
        detail: what was measured or what is wrong, in one line.
        remedy: what to type or do; empty when nothing needs doing here.
        follows: it is only a consequence of another finding on the same host.
    """

    host: str
    check: str
    status: Status
    detail: str
    remedy: str = ""
    follows: bool = False


class Verdict(NamedTuple):
    """A finding before it is known which check said it about which host."""

    status: Status
    detail: str
    remedy: str = ""


def ok(detail: str) -> Verdict:
    return Verdict(Status.OK, detail)


def warn(detail: str, remedy: str) -> Verdict:
    return Verdict(Status.WARN, detail, remedy)


def critical(detail: str, remedy: str) -> Verdict:
    return Verdict(Status.CRITICAL, detail, remedy)


def unknown(detail: str, remedy: str) -> Verdict:
    return Verdict(Status.UNKNOWN, detail, remedy)


def worst(statuses: Iterable[Status]) -> Status:
    """The most severe; OK of none."""
    return max(statuses, key=_SEVERITY.index, default=Status.OK)

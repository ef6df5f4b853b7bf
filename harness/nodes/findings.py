"""The result of a check of a host: status, detail and remedy."""

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


# UNKNOWN ranks below CRITICAL because a certain failure outweighs a possible one.
_SEVERITY = [Status.OK, Status.WARN, Status.UNKNOWN, Status.CRITICAL]


@dataclass(frozen=True)
class Finding:
    """One statement of one check about one host.

    Attributes:
        detail: the measurement or the problem, in one line.
        remedy: a command or an action; empty if none is needed.
        follows: this finding is a mere consequence of another one on the same host.
    """

    host: str
    check: str
    status: Status
    detail: str
    remedy: str = ""
    follows: bool = False


class Judgement(NamedTuple):
    """A finding without its host and check."""

    status: Status
    detail: str
    remedy: str = ""


def ok(detail: str) -> Judgement:
    return Judgement(Status.OK, detail)


def warn(detail: str, remedy: str) -> Judgement:
    return Judgement(Status.WARN, detail, remedy)


def critical(detail: str, remedy: str) -> Judgement:
    return Judgement(Status.CRITICAL, detail, remedy)


def unknown(detail: str, remedy: str) -> Judgement:
    return Judgement(Status.UNKNOWN, detail, remedy)


def worst(statuses: Iterable[Status]) -> Status:
    """The most severe status; OK if there is none."""
    return max(statuses, key=_SEVERITY.index, default=Status.OK)

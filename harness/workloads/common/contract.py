"""What a workload is: a typed configuration, the cases of its sweep, a body and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import Cluster
from harness.measure.store import Run
from harness.runtime.ranks.context import Context


def _nothing(config: Any) -> list[Need]:
    """A run that builds on no other."""
    return []


def _no_files(config: Any) -> None:
    """A case that names no file."""


def all_ranks(config: Any, n_ranks: int) -> int:
    """A case that takes every rank."""
    return n_ranks


def config_json(config: Any) -> dict[str, Any]:
    """A configuration as a run's header has it."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(asdict(config), enc_hook=str))
    return values


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One entry of WORKLOADS.

    Attributes:
        config: a frozen dataclass; each field has a default and a docstring, which is its `--help`.
        cases: splits one configuration into those of its runs (a sweep over batch sizes, say), each
            of which gets its own directory, status and row; validates and raises ConfigError.
        body: runs one case on every rank; returns a summary of a few JSON values (rank 0's is
            kept). Raises VerificationError when a result is wrong (the run becomes `invalid`), and
            lets out-of-memory errors out (the run becomes `oom`).
        table: the text that rank 0 prints at the end, from the runs as read back.
        n_ranks: how many ranks a case takes of those that were started: the first ones; the others
            wait. A sweep over rank counts (scaling) is so one launch.
        is_isolated: each run gets a process of its own, so that memory, peaks and a crash are its
            own; a workload that needs MPI itself runs in the rank's first process instead.
        needs: runs that a case builds on, in order; asked on rank 0 only, must not raise.
        renamed: flags by their old spelling, with the new one.
        check: looks at the files that a case names, once before any run of the sweep; asked on rank
            0 only, raises HarnessError.
    """

    config: type
    cases: Callable[[Any, int], list[Any]]
    body: Callable[[Any, Context], dict[str, Any]]
    table: Callable[[list[Run]], str]
    n_ranks: Callable[[Any, int], int] = all_ranks
    is_isolated: bool = True
    needs: Callable[[Any], list[Need]] = _nothing
    renamed: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Any], None] = _no_files


@dataclass(frozen=True, kw_only=True)
class Need:
    """A run that another one builds on, carried out before it where its results are missing.

    Attributes:
        name: of the workload, as in WORKLOADS.
        config: the flags that are not at their defaults, as in a run's header.
        is_met: whether the directory of results holds what it would write for this cluster (that of
            the ranks it takes); asked on rank 0 only, must not raise.
    """

    name: str
    config: dict[str, Any]
    is_met: Callable[[Path, Cluster], bool]

"""The interface of a workload: a typed configuration, the cases of its sweep, a body, a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import Cluster
from harness.measure.store import Run
from harness.runtime.ranks.sharing import Fetch
from harness.runtime.ranks.world import Context

# In the summary of a run that ended before this step, because a lost rank joins again.
UNTIL = "until"


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """How a run goes on after a rank, or the whole launch, was lost, or when a rank joins again.

    Attributes:
        run_id: the run that goes on.
        step: its first step; the state is that of the steps before.
        state: directory of the state; empty: it begins again.
        strategy, strategy_digest: by which it goes on; empty: as configured.
        change: planned changes of the strategy that are still to come, as the case gives them.
        until: it ends before this step, and the lost ranks join again; None: at the last step.
    """

    run_id: str
    step: int = 0
    state: str = ""
    strategy: str = ""
    strategy_digest: str = ""
    change: tuple[str, ...] = ()
    until: int | None = None

    @property
    def text(self) -> str:
        """In words, to follow `the other ranks`."""
        text = f"go on from step {self.step}" if self.state else "begin again"
        return text if self.until is None else f"{text}, all ranks from step {self.until}"


@dataclass(frozen=True, kw_only=True)
class Continuing:
    """How the runs of a workload go on after a rank, or the whole launch, was lost.

    Attributes:
        find: whether and how the ranks that are left go on, given the case, the directory of its
            last run, the lost ranks, of which there are none when a rank joins again, and a
            function that fetches the files of a directory from other hosts; called on rank 0 only,
            raises HarnessError where they cannot.
        go_on: the case by which so many ranks go on, with the continuation's `until`.
        grace_s: seconds that a rank has left after another has failed, to save what it holds.
        is_saved: whether a launch with --resume may go on with a case from any of its hosts.
        differing: names of the flags by which two configurations as JSON differ in what they train
            or by which strategy, on any number of ranks; without any, `--resume` continues the
            second by the first.
        strategy_flags: those that only choose the strategy.
    """

    find: Callable[[Any, Path, Sequence[int], Fetch], Continuation | None]
    go_on: Callable[[Any, Continuation, int], Any]
    grace_s: Callable[[Any], float]
    is_saved: Callable[[Any], bool]
    differing: Callable[[dict[str, Any], dict[str, Any]], frozenset[str]]
    strategy_flags: frozenset[str]


def config_json(config: Any) -> dict[str, Any]:
    """Convert a configuration to JSON values, as a run's header holds it."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(asdict(config), enc_hook=str))
    return values


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One entry of WORKLOADS.

    Attributes:
        config: a frozen dataclass; each field has a default and a docstring, which is its `--help`.
        cases: validates a configuration (raises ConfigError) and splits it into one configuration
            per run (a sweep over batch sizes, say). Each run has a directory, a status and a row.
        body: runs one case on every rank; returns a summary of a few JSON values (rank 0's is
            kept). Raises VerificationError when a result is wrong (the run becomes `invalid`), and
            lets out-of-memory errors propagate (the run becomes `oom`).
        table: the text that rank 0 prints at the end, from the runs as read back.
        is_isolated: each run gets its own processes, so that its memory and crashes do not affect
            later runs. A workload that needs MPI runs in each rank's first process instead.
        needs: runs that a case builds on, in order; called on rank 0 only, must not raise.
        renamed: old spellings of flags and those of other programs, each with the one here.
        continuing: how its runs go on after a loss; None: they never do.
        check: checks the files that a case names, given the results directory, once before any run
            of the sweep; called on rank 0 only, raises HarnessError.
    """

    config: type
    cases: Callable[[Any, int], list[Any]]
    body: Callable[[Any, Context], dict[str, Any]]
    table: Callable[[list[Run]], str]
    is_isolated: bool = True
    needs: Callable[[Any], list[Need]] = lambda config: []
    renamed: Mapping[str, str] = field(default_factory=dict)
    continuing: Continuing | None = None
    check: Callable[[Any, Path], None] = lambda config, results: None


@dataclass(frozen=True, kw_only=True)
class Need:
    """A run that another run builds on; the launcher inserts it where its results are missing.

    Attributes:
        name: the workload, as in WORKLOADS.
        config: the flags that differ from their defaults, as in a run's header.
        is_met: whether the results directory already holds this run's output for the cluster of
            its ranks; called on rank 0 only, must not raise.
    """

    name: str
    config: dict[str, Any]
    is_met: Callable[[Path, Cluster], bool]

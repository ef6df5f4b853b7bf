"""Run cases on all ranks, in four steps:

    run_cases      all runs: order, `--resume`, missing runs that they need
    _record_run    one run: its directory, header before and after it, records copied to rank 0
    _watch_run     deadline and heartbeats by the agent; outcomes of all ranks
    _run_part      this rank's part, in a child process, so that a crash does not end the sweep

All ranks make the same calls and exchange their outcomes after each run; rank 0 writes headers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from harness.cases import (
    Case,
    PlannedRun,
    adjacent_cases,
    case_of,
    check_files,
    describe_cluster,
    finished_repeats,
    needs_of,
    plan_runs,
    remaining_repeats,
    state_of,
    unlike_code,
    warn_of_other_launch,
)
from harness.domain.run import RankInfo, RunHeader, Status
from harness.errors import HarnessError, ResultsError
from harness.measure.heartbeat import HEADER_FILE, Heartbeat
from harness.measure.places import check_results
from harness.measure.reached import ReachedReader
from harness.measure.store import Run, claim_directory, read_run, write_header
from harness.resume import check_batches, check_ended, find_resumed
from harness.run import Outcome, RunSpec, lost_ranks, outcome_of, run_case, with_note, worst
from harness.runtime.agent import GRACE_S
from harness.runtime.devices.memory import return_freed_memory
from harness.runtime.ranks import sharing
from harness.runtime.ranks.host import code_commit, describe_rank
from harness.runtime.ranks.isolate import run_isolated
from harness.runtime.ranks.rendezvous import Meeting
from harness.workloads.common.contract import UNTIL, Continuation, Need, config_json
from harness.workloads.common.flags import RunOptions

_log = logging.getLogger(__name__)


class SweepEnded(ResultsError):
    """The sweep cannot continue; `headers` are those of its runs so far."""

    def __init__(self, problem: str, headers: list[RunHeader]) -> None:
        super().__init__(f"no further runs, because {problem}; then go on with --resume")
        self.headers = headers


class Launcher:
    """Runs cases on this rank; all ranks make the same calls."""

    def __init__(self, meeting: Meeting, options: RunOptions, argv: list[str]) -> None:
        self._meeting = meeting
        self._options = options
        self._argv = argv
        self._world = meeting.world
        self._control = meeting.control
        self.ranks = self._control.gather("ranks", describe_rank(self._world), RankInfo)
        self._results = Path(
            self._control.broadcast("results", str(options.results.absolute()), str)
        )
        self._commit = code_commit() if self._world.is_first else ""
        self._tried: set[str] = set()
        self._headers: list[RunHeader] = []

    def problem(self, cases: Sequence[Case]) -> str:
        """Describe an unusable results directory or other code of users on any rank, or a bad input
        file on rank 0; empty, on all ranks, if all are usable."""

        def check(fetch: sharing.Fetch) -> None:
            check_files(cases, self._results, fetch)
            if self._options.resume:
                planned = plan_runs(cases, self.ranks)
                for check_planned in (check_ended, check_batches):
                    check_planned(planned, self._results, len(self.ranks), fetch)

        problem = _problem_of(check_results, self._results, self._world.hostname)
        found = sharing.with_fetch(self._control, partial(_problem_of, check))
        problems = self._control.gather("problem", problem or found, str | None)
        found = next(filter(None, problems), "")
        return found or unlike_code(cases, self._world.hostnames, self._control)

    def run_cases(self, cases: Sequence[Case]) -> list[RunHeader]:
        """Run every case in order; returns the headers (complete on rank 0).

        Missing runs that adjacent cases of a workload build on come before the first of them, so
        that all are planned by the same measurements. The result includes the headers of finished
        runs that `--resume` skips.

        Raises:
            SweepEnded: rank 0 has no disk space for another run; raised on all ranks.
        """
        if self._world.is_first:
            warn_of_other_launch(self._results, self.ranks)
        planned = plan_runs(cases, self.ranks)
        is_resuming = self._options.resume and self._world.is_first
        done = finished_repeats(self._results, self.ranks) if is_resuming else {}
        repeats = remaining_repeats(planned, done)
        repeats = self._control.broadcast("repeats", repeats, list[int | None])
        if n_done := repeats.count(None):
            _log.info("%d of %d runs are in %s already", n_done, len(planned), self._results)
        for adjacent in adjacent_cases(cases):
            missing = [cases[at] for at in adjacent if repeats[at] is not None]
            self._run_missing_needs(missing, str(adjacent[0] + 1))
            for at in adjacent:
                plan, repeat = planned[at], repeats[at]
                if repeat is not None:
                    plan = replace(plan, repeat=repeat)
                    then = self._resumed(plan, planned) if self._options.resume else plan
                    if then is not None:
                        title = f"[{at + 1}/{len(cases)}] {plan.title} repeat {repeat}"
                        self._record_run(then, f"run{at + 1}", title)
                elif self._world.is_first:
                    self._headers.append(done[plan.key][plan.repeat])
        return self._headers

    def _run_missing_needs(self, cases: Sequence[Case], number: str) -> None:
        """Run the needs of cases that rank 0 does not find in the results."""
        n_before = len(self._headers)
        needs = needs_of(cases) if self._world.is_first else []
        while missing := self._control.broadcast("need", self._next_missing(needs), list[Any]):
            needed = case_of(*missing)
            place = f"{number}.{len(self._headers) - n_before}"
            self._run_missing_needs([needed], place)
            (plan,) = plan_runs([needed], self.ranks)
            self._record_run(plan, f"run{place}", f"[before {number}] {plan.title}")

    def _next_missing(self, needs: list[Need]) -> list[Any]:
        """Name and flags of the next missing need; each need is tried once per launch."""
        while needs:
            need = needs.pop(0)
            (plan,) = plan_runs([case_of(need.name, need.config)], self.ranks)
            cluster = describe_cluster(self._infos(plan))
            if plan.key not in self._tried and not need.is_met(self._results, cluster):
                self._tried.add(plan.key)
                return [need.name, need.config]
        return []

    def read(self, headers: list[RunHeader]) -> list[Run]:
        """Read the runs back from their files; rank 0 only."""
        found = [read_run(self._results / header.run_id, header) for header in headers]
        for path, reason in (problem for _, problems in found for problem in problems):
            _log.warning("%s: %s", path, reason)
        return [run for run, _ in found]

    def _infos(self, plan: PlannedRun) -> list[RankInfo]:
        """The ranks of a run, by their numbers in it."""
        used = [self.ranks[rank] for rank in plan.ranks]
        return [msgspec.structs.replace(info, rank=k) for k, info in enumerate(used)]

    def _hostnames(self, plan: PlannedRun) -> list[str]:
        return [self._world.hostnames[rank] for rank in plan.ranks]

    def _new_header(self, plan: PlannedRun) -> RunHeader:
        now = datetime.now(UTC)
        run_id = f"{now:%Y%m%dT%H%M%S}-{plan.case.name}-{plan.key[:6]}-r{plan.repeat}"
        if self._world.is_first:
            run_id = claim_directory(self._results, run_id, now.microsecond)
        return RunHeader(
            run_id=run_id,
            workload=plan.case.name,
            key=plan.key,
            repeat=plan.repeat,
            argv=self._argv,
            config=config_json(plan.case.config),
            cluster=describe_cluster(self._infos(plan)),
            ranks=self._infos(plan),
            versions=self._meeting.facts[0].versions,
            commit=self._commit,
            start_utc=now.isoformat(timespec="milliseconds"),
            backend=self._world.backend,
        )

    def _record_run(self, plan: PlannedRun, name: str, title: str) -> None:
        """Run once, write the header before and after, and copy all records to rank 0.

        `name` identifies the run to all ranks, and is unique in this launch."""
        _log.info("%s", title)
        if state := state_of(plan.case):  # which takes long, and is no part of the run's time
            sharing.distribute(self._control, state, self._world.hostnames)
        header = self._control.broadcast("header", self._new_header(plan), RunHeader)
        run_dir = self._results / header.run_id
        is_writing = self._write_first(plan, run_dir, header)
        is_away = self._hostnames(plan)[0] != self._world.hostnames[0]
        if is_away:
            sharing.distribute_results(self._control, self._results, self._world.hostnames)
        is_writer = self._world.is_first and not self._meeting.channel.has_agent
        with Heartbeat(run_dir) if is_writer else nullcontext():
            start_s = time.monotonic()
            outcomes = self._watch_run(plan, name, run_dir)
            if is_away:
                sharing.with_fetch(self._control, lambda fetch: fetch(run_dir))
            lost = lost_ranks(outcomes)
            status, reason, found = self._result(plan, run_dir, outcomes, lost)
            closed = msgspec.structs.replace(
                header,
                status=status,
                reason=reason,
                summary=outcomes[0].summary,
                duration_s=round(time.monotonic() - start_s, 3),
            )
            if is_writing and (problem := _problem_of(write_header, run_dir, closed)):
                _log.error(
                    "%s: %s, but run.json lacks this status: %s", header.run_id, status, problem
                )
            elif self._world.is_first:
                warn_of_other_launch(self._results, closed.ranks)
            self._meeting.channel.close_run()
        _log.info("%s: %s", title, closed.ending)
        self._headers.append(closed)
        if found is not None:
            self._go_on(plan, found, lost, name)

    def _write_first(self, plan: PlannedRun, run_dir: Path, header: RunHeader) -> bool:
        """Write the header before the run; returns whether this rank writes it afterwards, too.

        Raises:
            SweepEnded: rank 0 has no disk space; raised on all ranks.
        """
        is_first = self._world.is_first
        problem = _problem_of(write_header, run_dir, header) if is_first else ""
        if problem := self._control.broadcast("space", problem, str):
            raise SweepEnded(problem, self._headers)
        if is_first or not self._keeps_copy(plan, run_dir):
            return is_first
        if problem := _problem_of(write_header, run_dir, header):
            _log.warning("no launch with --resume can begin on this host: %s", problem)
        return not problem

    def _result(
        self, plan: PlannedRun, run_dir: Path, outcomes: list[Outcome], lost: Sequence[int]
    ) -> tuple[Status, str, Continuation | None]:
        """Status and reason of a run that has ended, and how it goes on; copies its records."""
        status, reason = worst(outcomes, self._hostnames(plan))
        if problem := self._copy_records(plan, run_dir, outcomes):
            reason = with_note(reason, problem)
            status = "crash" if status == "ok" else status
        found = self._find_continuation(plan, run_dir, lost) if lost else None
        if found is not None:
            left = "the other ranks" if len(lost) < len(plan.ranks) else "all ranks"
            reason = with_note(reason, f"{left} {found.text}")
        return status, reason, found

    def _find_continuation(
        self, plan: PlannedRun, run_dir: Path, lost: Sequence[int]
    ) -> Continuation | None:
        """How the ranks that are left go on, or all where none was lost; None if they cannot."""
        continuing = plan.case.workload.continuing
        if continuing is None:
            return None

        def find_here(fetch: sharing.Fetch) -> Continuation | None:
            try:
                return continuing.find(plan.case.config, run_dir, lost, fetch)
            except HarnessError as error:
                _log.warning("the ranks that are left cannot go on: %s", error)
                return None

        found = sharing.with_fetch(self._control, find_here)
        return self._control.broadcast("continuation", found, Continuation | None)

    def _go_on(self, plan: PlannedRun, found: Continuation, lost: Sequence[int], name: str) -> None:
        """Record the run by which the ranks that are left go on, and that of all ranks after it."""
        left = [rank for k, rank in enumerate(plan.ranks) if k not in lost] or list(plan.ranks)
        self._record_next(plan, found, left, f"{name}.{len(left)}")
        last = self._headers[-1]
        is_back = found.until is not None and last.summary.get(UNTIL) == found.until
        if is_back and plan.case.config.until != found.until:
            back = self._find_continuation(plan, self._results / last.run_id, [])
            if back is not None:
                self._record_next(plan, back, list(plan.ranks), f"{name}.back")

    def _record_next(
        self, plan: PlannedRun, found: Continuation, ranks: list[int], name: str
    ) -> None:
        """Record the run by which some ranks of the launch go on with a case."""
        then = self._continued(plan, found, ranks)
        title = f"[{len(ranks)} of {self._world.size} ranks {found.text}] {then.title}"
        self._record_run(then, name, title)

    def _continued(self, plan: PlannedRun, found: Continuation, ranks: Sequence[int]) -> PlannedRun:
        """The run by which some ranks of the launch go on with a case."""
        continuing = plan.case.workload.continuing
        assert continuing is not None, "it has found this continuation"
        case = replace(plan.case, config=continuing.go_on(plan.case.config, found, len(ranks)))
        (then,) = plan_runs([case], [self.ranks[rank] for rank in ranks])
        return replace(then, repeat=plan.repeat)

    def _resumed(self, plan: PlannedRun, planned: Sequence[PlannedRun]) -> PlannedRun | None:
        """The run that goes on where an earlier launch ended; the plan itself if there is none, and
        None if other ranks have gone on to the end."""
        find = partial(find_resumed, self._results, plan, planned, self._world.size)
        earlier = sharing.with_fetch(self._control, find)
        if isinstance(earlier, RunHeader):
            self._headers.append(earlier)
        if self._control.broadcast("done", isinstance(earlier, RunHeader), bool):
            return None
        found = earlier if isinstance(earlier, Continuation) else None
        found = self._control.broadcast("resumed", found, Continuation | None)
        return plan if found is None else self._continued(plan, found, plan.ranks)

    def _watch_run(self, plan: PlannedRun, name: str, run_dir: Path) -> list[Outcome]:
        """Run this rank's part while the agents watch it; returns the outcomes of all ranks."""
        channel, is_isolated = self._meeting.channel, plan.case.workload.is_isolated
        channel.begin_run(
            name,
            str(run_dir) if self._world.is_first else "",
            self._options.run_timeout_s,
            is_isolated=is_isolated,
        )
        outcome = Outcome(status="ok")
        if self._world.rank in plan.ranks:
            outcome = self._run_part(plan, name, run_dir)
        host = f"({self._world.hostname})"
        fault = None
        if outcome.status != "ok":
            self._control.report_failure(name, f"{host} {outcome.reason}")
            if not is_isolated:  # agents end the launch, because MPI calls cannot be interrupted
                status = "skipped" if outcome.peers else outcome.status
                fault = (status, f"rank {self._world.rank} {host}: {outcome.reason}")
        channel.end_part(name, fault)
        outcomes = self._control.gather("outcome", outcome, Outcome)
        channel.end_run()
        if not is_isolated:
            if dist.is_initialized():
                dist.destroy_process_group()
            return_freed_memory()
        return [outcomes[rank] for rank in plan.ranks]

    def _run_part(self, plan: PlannedRun, name: str, run_dir: Path) -> Outcome:
        """Run this rank's part, in a child process unless the workload needs MPI."""
        meeting, workload, config = self._meeting, plan.case.workload, plan.case.config
        continuing = workload.continuing
        hostnames, rank = self._hostnames(plan), plan.ranks.index(self._world.rank)
        world = replace(self._world, rank=rank, size=len(hostnames), hostnames=hostnames)
        spec = RunSpec(
            name=name,
            run_dir=str(run_dir),
            address=meeting.address,
            port=meeting.port,
            collective_timeout_s=self._options.collective_timeout_s,
        )
        if not workload.is_isolated:
            return run_case(workload.body, config, world, spec)
        with closing(ReachedReader()) as reached:
            spec = msgspec.structs.replace(spec, reached_file=reached.path)
            ending = run_isolated(
                run_case,
                (workload.body, config, replace(world, mpi=None), spec),
                timeout_s=self._options.run_timeout_s,
                peer_failure=lambda: self._control.read_failure(name),
                reached=reached,
                grace_s=GRACE_S if continuing is None else continuing.grace_s(config),
            )
        return outcome_of(ending)

    def _copy_records(self, plan: PlannedRun, run_dir: Path, outcomes: list[Outcome]) -> str:
        """Copy records to rank 0 from ranks that do not share its disk; returns an error or ""."""
        paths = {rank: run_dir / f"rank{k}.jsonl" for k, rank in enumerate(plan.ranks)}
        done = [rank for rank, one in zip(plan.ranks, outcomes, strict=True) if one.status == "ok"]
        for rank, problem in sharing.copy_to_first(self._control, paths, done).items():
            return f"rank {plan.ranks.index(rank)} ({self._world.hostnames[rank]}): {problem}"
        return ""

    def _keeps_copy(self, plan: PlannedRun, run_dir: Path) -> bool:
        """Whether this rank keeps a copy of the header for its host, which has a disk of its own,
        because a launch with --resume may begin there."""
        hostnames, continuing = self._world.hostnames, plan.case.workload.continuing
        is_saved = continuing is not None and continuing.is_saved(plan.case.config)
        is_first = hostnames.index(self._world.hostname) == self._world.rank
        return is_saved and is_first and not (run_dir / HEADER_FILE).exists()


def _problem_of(act: Callable[..., object], *arguments: object) -> str:
    """Act; returns the error that it raises, or ""."""
    try:
        act(*arguments)
    except HarnessError as error:
        return str(error)
    return ""

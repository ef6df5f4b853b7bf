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
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from harness.cases import (
    Case,
    PlannedRun,
    adjacent_cases,
    case_of,
    describe_cluster,
    finished_repeats,
    needs_of,
    plan_runs,
    remaining_repeats,
)
from harness.domain.run import RankInfo, RunHeader
from harness.errors import ConfigError, HarnessError, ResultsError
from harness.measure.heartbeat import Heartbeat
from harness.measure.reached import ReachedReader
from harness.measure.store import (
    Results,
    Run,
    read_run,
    try_directory,
    write_atomically,
    write_header,
)
from harness.run import Outcome, RunSpec, run_case, worst
from harness.runtime.devices.peaks import peak_flops_per_s
from harness.runtime.ranks.host import code_commit
from harness.runtime.ranks.isolate import Ending, run_isolated
from harness.runtime.ranks.rendezvous import Meeting, without_mpi
from harness.workloads.common.contract import Need, config_json
from harness.workloads.common.flags import check_above_zero

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Flags that every workload shares."""

    results: Path = Path("results")
    """Results directory; each run gets a directory in it."""
    resume: bool = False
    """Skip runs that the results directory already holds with status ok or oom (out of memory)."""
    dry_run: bool = False
    """Print the runs in order and exit without running them."""
    run_timeout_s: float = 3600.0
    """Stop a run after this many seconds and record it with status timeout; the sweep goes on,
    except after links, which shares the ranks' first processes."""
    collective_timeout_s: float = 300.0
    """Fail a run in which a rank has waited for other ranks in a collective for this long."""
    heartbeat_timeout_s: float = 30.0
    """End the sweep on all hosts if a rank or host has sent no sign of life for this long (or for
    --run-timeout-s, if that is shorter); the run is recorded."""

    def check(self, config: Any) -> None:
        """Refuse limits that are not positive or too short for the workload.

        Args:
            config: the workload's configuration; None for the comparison.

        Raises:
            ConfigError: names the flag.
        """
        check_above_zero(self, ("run_timeout_s", "collective_timeout_s", "heartbeat_timeout_s"))
        wait_s = getattr(config, "longest_wait_s", 0.0)
        if wait_s > self.collective_timeout_s:
            raise ConfigError(
                f"--time-budget-s {wait_s:g} is longer than a rank waits for another, "
                f"--collective-timeout-s {self.collective_timeout_s:g}: lower the first or raise "
                "the second"
            )


class SweepEnded(ResultsError):
    """The sweep cannot continue.

    Attributes:
        headers: headers of the runs so far.
    """

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
        self.ranks = self._control.gather("ranks", self._describe_rank(), RankInfo)
        self._results = Path(
            self._control.broadcast("results", str(options.results.absolute()), str)
        )
        self._commit = code_commit() if self._world.is_first else ""
        self._tried: set[str] = set()
        self._headers: list[RunHeader] = []

    def problem(self, cases: Sequence[Case]) -> str:
        """Describe an unusable results directory on any rank, or a bad input file on rank 0.

        Returns an empty text if all are usable; the result is the same on all ranks.
        """
        problem = ""
        try:
            self._check_results()
            if self._world.is_first:
                self._check_files(cases)
        except HarnessError as error:
            problem = str(error)
        return next(filter(None, self._control.gather("problem", problem, str)), "")

    def _check_files(self, cases: Sequence[Case]) -> None:
        checks = {(case.name, case.config): case.workload.check for case in cases}
        for (_, config), check in checks.items():
            check(config)

    def _check_results(self) -> None:
        try:
            try_directory(self._results)
        except OSError as error:
            raise ResultsError(
                f"--results {self._results} cannot be written on {self._world.hostname} "
                f"({error.strerror}): give a directory that you may write to"
            ) from None

    def run_cases(self, cases: Sequence[Case]) -> list[RunHeader]:
        """Run every case in order; returns the headers (complete on rank 0).

        Missing runs that adjacent cases of a workload build on come before the first of them, so
        that all are planned by the same measurements. The result includes the headers of finished
        runs that `--resume` skips.

        Raises:
            SweepEnded: rank 0 has no disk space for another run; raised on all ranks.
        """
        planned = plan_runs(cases, self.ranks)
        done = finished_repeats(self._results) if self._options.resume else {}
        repeats = remaining_repeats(planned, done)
        repeats = self._control.broadcast("repeats", repeats, list[int | None])
        if n_done := repeats.count(None):
            _log.info("%d of %d runs are in %s already", n_done, len(planned), self._results)
        for adjacent in adjacent_cases(cases):
            missing = [cases[at] for at in adjacent if repeats[at] is not None]
            self._run_missing_needs(missing, str(adjacent[0] + 1))
            for at in adjacent:
                plan, number, repeat = planned[at], at + 1, repeats[at]
                if repeat is not None:
                    title = f"[{number}/{len(cases)}] {plan.case.name} {plan.key} repeat {repeat}"
                    self._record_run(replace(plan, repeat=repeat), f"run{number}", title)
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
            self._record_run(plan, f"run{place}", f"[before {number}] {needed.name} {plan.key}")

    def _next_missing(self, needs: list[Need]) -> list[Any]:
        """Name and flags of the next missing need; each need is tried once per launch."""
        while needs:
            need = needs.pop(0)
            (plan,) = plan_runs([case_of(need.name, need.config)], self.ranks)
            cluster = describe_cluster(self.ranks[: plan.n_ranks])
            if plan.key not in self._tried and not need.is_met(self._results, cluster):
                self._tried.add(plan.key)
                return [need.name, need.config]
        return []

    def read(self, headers: list[RunHeader]) -> list[Run]:
        """Read the runs back from their files; rank 0 only."""
        results = Results()
        for header in headers:
            read_run(self._results / header.run_id, results)
        for path, reason in results.skipped:
            _log.warning("%s: %s", path, reason)
        return results.runs

    def _describe_rank(self) -> RankInfo:
        world = self._world
        return RankInfo(
            rank=world.rank,
            hostname=world.hostname,
            device=str(world.device),
            device_kind=world.device_kind,
            n_cores=world.n_cores,
            memory_bytes=world.memory_bytes,
            interface=world.interface,
            nic_bytes_per_s=world.nic_bytes_per_s,
            peak_flops_per_s={
                dtype: peak / world.n_sharing
                for dtype, peak in peak_flops_per_s(world.device_kind).items()
            },
        )

    def _new_header(self, plan: PlannedRun) -> RunHeader:
        now = datetime.now(UTC)
        run_id = f"{now:%Y%m%dT%H%M%S}-{plan.case.name}-{plan.key[:6]}-r{plan.repeat}"
        if (self._results / run_id).exists():
            run_id += f"-{now.microsecond}"
        return RunHeader(
            run_id=run_id,
            workload=plan.case.name,
            key=plan.key,
            repeat=plan.repeat,
            argv=self._argv,
            config=config_json(plan.case.config),
            cluster=describe_cluster(self.ranks[: plan.n_ranks]),
            ranks=self.ranks[: plan.n_ranks],
            versions=self._meeting.facts[0].versions,
            commit=self._commit,
            start_utc=now.isoformat(timespec="milliseconds"),
            backend=self._world.backend,
        )

    def _record_run(self, plan: PlannedRun, name: str, title: str) -> None:
        """Run once, write the header before and after, and copy all records to rank 0.

        Args:
            name: identifies the run to all ranks; unique in this launch.
        """
        _log.info("%s", title)
        header = self._control.broadcast("header", self._new_header(plan), RunHeader)
        run_dir = self._results / header.run_id
        problem = self._write_header(run_dir, header)
        if problem := self._control.broadcast("space", problem, str):
            raise SweepEnded(problem, self._headers)
        is_writer = self._world.is_first and not self._meeting.channel.has_agent
        with Heartbeat(run_dir) if is_writer else nullcontext():
            start_s = time.monotonic()
            outcomes = self._watch_run(plan, name, run_dir)
            status, reason = worst(outcomes, self._world.hostnames)
            if problem := self._copy_records(run_dir):
                reason = f"{reason}; {problem}" if reason else problem
                status = "crash" if status == "ok" else status
            closed = msgspec.structs.replace(
                header,
                status=status,
                reason=reason,
                summary=outcomes[0].summary,
                duration_s=round(time.monotonic() - start_s, 3),
            )
            if problem := self._write_header(run_dir, closed):
                _log.error(
                    "%s: %s, but run.json lacks this status: %s", header.run_id, status, problem
                )
            self._meeting.channel.close_run()
        _log.info("%s: %s", title, closed.ending)
        self._headers.append(closed)

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
        if self._world.rank < plan.n_ranks:
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
            _free_process()
        return outcomes

    def _run_part(self, plan: PlannedRun, name: str, run_dir: Path) -> Outcome:
        """Run this rank's part, in a child process unless the workload needs MPI."""
        meeting, workload, config = self._meeting, plan.case.workload, plan.case.config
        world = replace(
            self._world, size=plan.n_ranks, hostnames=self._world.hostnames[: plan.n_ranks]
        )
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
                (workload.body, config, without_mpi(world), spec),
                timeout_s=self._options.run_timeout_s,
                peer_failure=lambda: self._control.read_failure(name),
                reached=reached,
            )
        return _outcome_of(ending)

    def _copy_records(self, run_dir: Path) -> str:
        """Copy records to rank 0 from ranks that do not share its disk; returns an error or ""."""
        path = run_dir / f"rank{self._world.rank}.jsonl"
        sizes = self._control.gather("sizes", path.stat().st_size if path.exists() else -1, int)
        missing = [
            rank
            for rank, size in enumerate(sizes)
            if size >= 0 and not _has_size(run_dir / f"rank{rank}.jsonl", size)
        ]
        missing = self._control.broadcast("missing", missing, list[int])
        if not missing:
            return ""
        data = path.read_bytes() if self._world.rank in missing else None
        problem = ""
        for rank, content in self._control.send_to_first("records", data).items():
            try:
                write_atomically(run_dir / f"rank{rank}.jsonl", content)
            except ResultsError as error:
                problem = f"records of rank {rank} stay on {self._world.hostnames[rank]}: {error}"
        return problem

    def _write_header(self, run_dir: Path, header: RunHeader) -> str:
        """Write the header on rank 0; returns an error or ""."""
        try:
            if self._world.is_first:
                write_header(run_dir, header)
        except ResultsError as error:
            return str(error)
        return ""


def _outcome_of(ending: Ending) -> Outcome:
    if ending.status == "ok":
        outcome: Outcome = ending.value
    else:
        outcome = msgspec.convert({"status": ending.status, "reason": ending.reason}, Outcome)
    return msgspec.structs.replace(outcome, standstill=ending.standstill)


def _free_process() -> None:
    """Free the process group and GPU memory of a run in this process, for later runs."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.cuda.empty_cache()  # does nothing unless a GPU was used


def _has_size(path: Path, n_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == n_bytes

"""One run on one rank, the loop over its steps, and the status of the run from all ranks.

`run_case` sets up threads, process group, clock, recorder and writer, calls the workload's body and
turns its result or error into an Outcome. `measure_steps` is the loop over measured steps.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from harness.domain.run import Status
from harness.errors import (
    ClusterError,
    ConfigError,
    DataError,
    GraphError,
    HarnessError,
    ModelError,
    PeerError,
    PlanError,
    ResultsError,
    StrategyError,
    VerificationError,
    first_line,
)
from harness.measure.reached import PHASES, Reached, Standstill
from harness.measure.recorder import HostClock, Recorder
from harness.measure.store import RecordWriter
from harness.runtime.devices.memory import is_out_of_memory, keep_freed_memory
from harness.runtime.devices.sampling import clock_for
from harness.runtime.ranks.failures import gist, has_lost_peer, has_timed_out, located
from harness.runtime.ranks.gather import measure_clock_offset
from harness.runtime.ranks.host import processor_seconds
from harness.runtime.ranks.isolate import Ending
from harness.runtime.ranks.rendezvous import join_process_group
from harness.runtime.ranks.world import Context, Progress, World

# The worst status of a rank becomes that of the run; `skipped` follows from another's failure.
_SEVERITY: list[Status] = ["ok", "skipped", "crash", "timeout", "invalid", "oom"]
# Statuses that another rank may have caused.
_WAITED = ("skipped", "timeout")
# Of the run's inputs or of its result; other errors are of the machine.
_REFUSALS = (
    ClusterError, ConfigError, DataError, GraphError, ModelError, PlanError, StrategyError,
    VerificationError,
)  # fmt: skip


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended on one rank.

    Attributes:
        peers: ranks that the failed rank waited for; one of them did not answer.
        standstill: the point at which the rank was stuck, if it made no progress.
        is_explained: the rank raised the exception in `reason` itself; no peer caused it.
        is_lost: the rank's process died without an answer.
        is_aborted: it died of SIGABRT.
    """

    status: Status
    reason: str = ""
    peers: tuple[int, ...] = ()
    is_explained: bool = False
    is_lost: bool = False
    is_aborted: bool = False
    standstill: Standstill | None = None
    summary: dict[str, Any] = {}

    @property
    def headline(self) -> str:
        """The first line of the reason."""
        return self.reason.partition("\n")[0]


def outcome_of(ending: Ending) -> Outcome:
    """The outcome that a rank's process gave, or how it ended without one."""
    if ending.status == "ok":
        outcome: Outcome = ending.value
    else:
        # A rank that was stopped, because another had failed, is not lost.
        is_lost = ending.status in ("crash", "oom")
        fields = {"status": ending.status, "reason": ending.reason, "is_lost": is_lost}
        outcome = msgspec.convert(fields | {"is_aborted": ending.is_aborted}, Outcome)
    return msgspec.structs.replace(outcome, standstill=ending.standstill)


def lost_ranks(outcomes: Sequence[Outcome]) -> list[int]:
    """The ranks whose process died, but for those that NCCL's watchdog aborted for that reason."""
    lost = [rank for rank, outcome in enumerate(outcomes) if outcome.is_lost]
    return [rank for rank in lost if not outcomes[rank].is_aborted] or lost


def worst(outcomes: list[Outcome], hostnames: list[str]) -> tuple[Status, str]:
    """Return the run's status and the reason, with the rank and host that most likely caused it.

    A rank with its own failure comes before ranks that waited for others. Of the waiting ranks,
    one that waited for a rank which itself waited for none comes first. The reason of a second
    failed rank is added if it differs, because a rank that dies silently leaves the explanation
    to its peers; it is left out if the first rank raised an exception and the second only waited.
    If all failed ranks waited, a stopped rank comes first, or the one behind all others.
    """
    status = max((outcome.status for outcome in outcomes), key=_SEVERITY.index)
    if status == "ok":
        return status, ""
    names = [f"rank {rank} ({hostname})" for rank, hostname in enumerate(hostnames)]
    failed = {rank: one for rank, one in enumerate(outcomes) if one.status == status}
    silent = {peer for one in failed.values() for peer in one.peers}
    silent -= {rank for rank, one in failed.items() if one.peers}
    cause, *others = sorted(failed, key=lambda rank: _distance(failed[rank], silent))
    if failed[cause].is_explained:
        others = [other for other in others if not failed[other].peers]
    first, *rest = f"{names[cause]}: {failed[cause].reason}".splitlines()
    unlike = [rank for rank in others if failed[rank].headline != failed[cause].headline]
    if unlike:
        first += f"; {names[unlike[0]]}: {failed[unlike[0]].headline}"
    stuck = _stuck_rank(outcomes, failed.values())
    if stuck is not None:
        rank, standstill = stuck
        first = f"{names[rank]}: {standstill.text}; {first}"
    elif failed[cause].peers and silent:
        told = ", ".join(names[rank].removeprefix("rank ") for rank in sorted(silent))
        first += f"; no answer came from rank {told}"
    return "crash" if status == "skipped" else status, "\n".join([first, *rest])


def with_note(reason: str, note: str) -> str:
    """A reason with a note in its first line, which is the one that people see first."""
    first, newline, rest = reason.partition("\n")
    return f"{first}; {note}{newline}{rest}" if reason else note


def _distance(failed: Outcome, silent: set[int]) -> int:
    """How far a failed rank is from the cause; `silent` are the ranks that gave others no answer,
    and waited for none."""
    if failed.is_aborted:  # perhaps because another rank has died
        return 3
    return 0 if not failed.peers else 1 if silent.intersection(failed.peers) else 2


def _stuck_rank(
    outcomes: Iterable[Outcome], failed: Iterable[Outcome]
) -> tuple[int, Standstill] | None:
    """Find the rank that the others waited for, by progress.

    None if a rank failed by itself, or if no single rank is behind all others. A rank that
    computes counts as behind one that waits in a collective.
    """
    if any(not outcome.peers and outcome.status not in _WAITED for outcome in failed):
        return None
    standstills = [
        (rank, outcome.standstill)
        for rank, outcome in enumerate(outcomes)
        if outcome.standstill is not None and outcome.status != "ok"
    ]
    for rank, standstill in standstills:
        if standstill.is_stopped:
            return rank, standstill
    order = sorted(standstills, key=lambda one: _progress(one[1]))
    is_behind = len(order) > 1 and _progress(order[0][1]) < _progress(order[1][1])
    return order[0] if is_behind else None


def _progress(standstill: Standstill) -> tuple[bool, int, int]:
    """Sort key of progress: computing before waiting, then by step and phase."""
    step = -1 << 40 if standstill.step is None else standstill.step
    return standstill.is_waiting, step, PHASES.index(standstill.phase)


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one run, for every rank.

    Attributes:
        name: unique in the launch; prefix of the process group's keys in the store.
        collective_timeout_s: a collective fails after waiting this long.
        reached_file: file in which this rank publishes its progress; empty: it does not.
    """

    name: str
    run_dir: str
    address: str
    port: int
    collective_timeout_s: float
    reached_file: str = ""


def measure_steps(
    step: Callable[[int], object],
    context: Context,
    *,
    n_steps: int,
    n_warm_up: int,
    first: int,
    between: Callable[[int], str],
) -> None:
    """Warm up, then record steps as back-to-back `step` spans; all ranks must call it.

    Records are written after each step, outside its span, without waiting for the device.

    Args:
        step: called with the step's index; warm-up steps have -n_warm_up to -1.
        n_steps: number of the last recorded step, plus one.
        first: number of the first recorded step; above 0 without warm-up.
        between: called after each measured step, outside its span; returns a note on it.
    """
    recorder = context.recorder
    context.flush()
    for index in range(0 if first else -n_warm_up, 0):
        recorder.reached.begin_step(index)
        step(index)
    recorder.discard()
    start = recorder.clock.mark()
    for index in range(first, n_steps):
        recorder.step = index
        step(index)
        end = recorder.clock.mark()
        recorder.add_marks("step", start, end)
        note = between(index)
        context.flush()
        context.progress.update("training steps", index + 1, n_steps, note)
        start = recorder.clock.mark()
    recorder.step = None


def _classify(error: BaseException, world: World) -> Outcome:
    if is_out_of_memory(error):
        return Outcome(status="oom", reason=first_line(error))
    if isinstance(error, HarnessError):
        peers = error.peers if isinstance(error, PeerError) else ()
        status: Status = "invalid" if isinstance(error, _REFUSALS) else "crash"
        return Outcome(status=status, reason=str(error), peers=peers, is_explained=not peers)
    # gloo names its transport in time-outs and lost connections, so the time-out is tested first.
    if has_timed_out(error):
        where = "".join(traceback.format_exception(error))
        reason = f"a collective had no answer from another rank ({gist(error)})\n{where}"
        peers = tuple(rank for rank in range(world.size) if rank != world.rank)
        return Outcome(status="crash", reason=reason, peers=peers)
    if has_lost_peer(error):
        return Outcome(status="skipped", reason=f"lost its peer: {gist(error)}")
    return Outcome(status="crash", reason=located(error), is_explained=True)


Body = Callable[[Any, Context], dict[str, Any]]


def _run_body(body: Body, config: Any, world: World, spec: RunSpec) -> dict[str, Any]:
    torch.set_num_threads(world.n_threads)
    keep_freed_memory(world.device)
    join_process_group(world, spec.address, spec.port, spec.name, spec.collective_timeout_s)
    # Clock offsets need the process group; the recorder starts here for the same time origin.
    recorder = Recorder(clock_for(world.device), Reached(spec.reached_file))
    host_clock = HostClock()
    offset_s, error_s = measure_clock_offset(world, host_clock)
    recorder.sample("clock_offset_s", offset_s)
    recorder.sample("clock_offset_error_s", error_s)
    run_dir = Path(spec.run_dir)
    writer = RecordWriter(run_dir, world.rank)
    context = Context(
        world=world,
        recorder=recorder,
        writer=writer,
        progress=Progress(is_shown=world.is_first),
        run_dir=run_dir,
        collective_timeout_s=spec.collective_timeout_s,
    )
    before = processor_seconds()
    try:
        context.flush()
        summary = body(config, context)
    except BaseException:
        # The body's error is the reason even if the disk is too full for the last records.
        with contextlib.suppress(ResultsError):
            _finish(recorder, writer, before)
        raise
    _finish(recorder, writer, before)
    return summary


def _finish(recorder: Recorder, writer: RecordWriter, before: tuple[float, float]) -> None:
    """Write the last records, and the share of CPU time that a hypervisor stole since `before`."""
    (stolen_before_s, before_s), (stolen_s, all_s) = before, processor_seconds()
    if all_s > before_s:
        share = (stolen_s - stolen_before_s) / (all_s - before_s)
        recorder.sample("cpu_stolen_share", share)
    writer.write(recorder.collect_ready())
    writer.close()


def run_case(body: Body, config: Any, world: World, spec: RunSpec) -> Outcome:
    """Execute one run on this rank; every rank of the world must call it. Never raises."""
    try:
        summary = _run_body(body, config, world, spec)
    except (Exception, SystemExit) as error:  # of the user's code, which may leave
        # The process group is not destroyed, because that could wait for a failed peer.
        return _classify(error, world)
    dist.destroy_process_group()
    return Outcome(status="ok", summary=summary)

"""One run on one rank, and the loop over its steps.

`run_case` sets up threads, process group, clock, recorder and writer, calls the workload's body and
turns its result or error into an Outcome. `measure_steps` is the only loop over steps.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from harness.errors import HarnessError, PeerError, ResultsError, VerificationError, first_line
from harness.measure.clock import HostClock
from harness.measure.reached import Reached
from harness.measure.recorder import Recorder
from harness.measure.store import RecordWriter
from harness.outcome import Outcome
from harness.runtime.devices.cuda_clock import clock_for
from harness.runtime.devices.memory import is_out_of_memory, keep_freed_memory
from harness.runtime.ranks.clock_offset import measure_clock_offset
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.failures import gist, has_lost_peer, has_timed_out, located
from harness.runtime.ranks.host import processor_seconds
from harness.runtime.ranks.progress import Progress
from harness.runtime.ranks.rendezvous import join_process_group
from harness.runtime.ranks.world import World


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
    label: str,
    between: Callable[[int], None] = lambda index: None,
) -> None:
    """Warm up, then record `n_steps` steps as back-to-back `step` spans; all ranks must call it.

    Records are written after each step, outside its span, without waiting for the device.

    Args:
        step: called with the step's index; warm-up steps have -n_warm_up to -1.
        label: names the steps on the progress line.
        between: called after each measured step, outside its span.
    """
    recorder = context.recorder
    context.flush()
    for index in range(-n_warm_up, 0):
        recorder.reached.begin_step(index)
        step(index)
    recorder.discard()
    start = recorder.clock.mark()
    for index in range(n_steps):
        recorder.step = index
        step(index)
        end = recorder.clock.mark()
        recorder.add_marks("step", start, end)
        between(index)
        context.flush()
        context.progress.update(label, index + 1, n_steps)
        start = recorder.clock.mark()
    recorder.step = None


def _classify(error: BaseException, world: World) -> Outcome:
    if is_out_of_memory(error):
        return Outcome(status="oom", reason=first_line(error))
    if isinstance(error, VerificationError):
        return Outcome(status="invalid", reason=str(error))
    if isinstance(error, HarnessError):
        peers = error.peers if isinstance(error, PeerError) else ()
        return Outcome(status="crash", reason=str(error), peers=peers, is_explained=not peers)
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
    except Exception as error:
        # The process group is not destroyed, because that could wait for a failed peer.
        return _classify(error, world)
    dist.destroy_process_group()
    return Outcome(status="ok", summary=summary)

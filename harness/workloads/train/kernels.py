"""Steps under torch.profiler: each rank's operators and kernels as a trace, and the longest ones.

The profiler slows the host, so these steps are extra, and none of them is measured.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from harness.domain.record import MAX_TEXT, Label, Sample, SpanKind
from harness.measure.reached import Reached
from harness.measure.store import replacing, writing
from harness.runtime.ranks.world import Context

TRACE_FILE = "rank{rank}.pt.trace.json.gz"
"""Of a rank in a run's directory, named as TensorBoard and Holistic Trace Analysis expect it."""
MOST_KERNELS = 20


class _NamedPhases(Reached):
    """Publishes progress as before, and names the current phase in the trace."""

    def __init__(self, published: Reached) -> None:
        super().__init__()
        self.published, self._phase = published, ExitStack()

    def begin_step(self, step: int) -> None:
        self.published.begin_step(step)

    def begin(self, phase: SpanKind) -> None:
        self.published.begin(phase)
        self.end()
        self._phase.enter_context(record_function(phase))

    def end(self) -> None:
        self._phase.close()


def trace_steps(step: Callable[[], object], n_steps: int, context: Context) -> None:
    """Profile `n_steps` steps after one that warms the profiler up; all ranks must call it.

    Writes TRACE_FILE into the run's directory, and records the longest kernels of a GPU (on a CPU:
    operators) as samples `kernel_s`, in seconds per step.

    Raises:
        ResultsError: the trace cannot be written.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write on stderr
    recorder, device = context.recorder, context.world.device
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    phases = _NamedPhases(recorder.reached)
    recorder.reached = phases
    try:
        with profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=n_steps)
        ) as profiler:
            for index in range(n_steps + 1):
                if index:
                    profiler.step()
                step()
                phases.end()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        recorder.reached = phases.published
    recorder.discard()
    _write(profiler, context.run_dir / TRACE_FILE.format(rank=context.world.rank))
    for name, seconds, calls in _longest(profiler):
        each: dict[str, Label] = {"name": name[:MAX_TEXT], "calls": calls / n_steps}
        recorder.add(Sample(metric="kernel_s", value=seconds / n_steps, labels=each))


def _write(profiler: Any, path: Path) -> None:
    with replacing(path) as temporary, TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        with writing(plain):  # a full disk leaves no file, without an error
            profiler.export_chrome_trace(str(plain))
            source = plain.open("rb")
        with source, gzip.open(temporary, "wb") as target:
            shutil.copyfileobj(source, target)


def _longest(profiler: Any) -> list[tuple[str, float, int]]:
    """Name, seconds and calls in all profiled steps; of operators without those that they call."""
    rows = [row for row in profiler.key_averages() if not row.is_user_annotation]
    kernels = [row for row in rows if row.device_type != torch.autograd.DeviceType.CPU]
    timed = [(row.key, row.self_device_time_total, row.count) for row in kernels]
    timed = timed or [(row.key, row.self_cpu_time_total, row.count) for row in rows]
    longest = sorted(timed, key=lambda row: -row[1])[:MOST_KERNELS]
    return [(name, microseconds * 1e-6, calls) for name, microseconds, calls in longest]

"""The arguments of a workload's body: world, recorder, writer and progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.measure.recorder import Recorder
from harness.measure.store import RecordWriter
from harness.runtime.ranks.progress import Progress
from harness.runtime.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class Context:
    """One run on one rank.

    Attributes:
        recorder: collects spans and samples by the device's clock (CUDA events or host).
        writer: appends to this rank's file; call `flush` between steps, never inside a span.
        progress: shows progress on rank 0's terminal; silent on other ranks.
        run_dir: directory of the run's files.
        collective_timeout_s: longest wait for other ranks before the run fails.
    """

    world: World
    recorder: Recorder
    writer: RecordWriter
    progress: Progress
    run_dir: Path
    collective_timeout_s: float = 300.0

    def flush(self) -> None:
        """Write the records that are complete, without waiting for the device."""
        self.writer.write(self.recorder.collect_ready())

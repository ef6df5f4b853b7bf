"""Keep the state of a training in files: on a schedule, and when another rank dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import HarnessError, PeerError
from harness.runtime.ranks.failures import has_lost_peer
from harness.runtime.ranks.world import Context
from harness.workloads.train.config import TrainCase
from harness.workloads.train.continuation import N_KEPT, SCHEDULED, SURVIVORS, state_directory
from harness.workloads.train.setup import Training

if TYPE_CHECKING:
    from harness.runtime.executor.engine import ExecutorEngine
    from harness.runtime.executor.state.survivor import Survivor

_log = logging.getLogger(__name__)


class StateKeeper:
    """Saves one rank's part of the state; steps are the measured ones, warm-up below 0."""

    def __init__(self, case: TrainCase, context: Context) -> None:
        self._case, self._context = case, context
        self._engine: ExecutorEngine | None = None
        self._survivor: Survivor | None = None
        self._step = 0

    def begin_step(self, step: int, training: Training) -> None:
        """Remember the state before a step, in case that another rank dies in it."""
        self._step = step
        if not self._case.survive:
            return
        assert training.trainer.elastic is not None, "other engines were refused"
        engine = training.trainer.elastic.engine
        if self._survivor is None or engine is not self._engine:
            from harness.runtime.executor.state.survivor import Survivor

            self._engine, self._survivor = engine, Survivor(engine, self._context.world)
        self._survivor.begin_step()

    def end_step(self, step: int, training: Training) -> None:
        """Save the state after a step if it is time; all ranks must call it."""
        every, after = self._case.save_every, step + 1
        if not every or after <= 0 or after % every:
            return
        save_sharded = training.trainer.save_sharded
        assert save_sharded is not None, "other engines were refused"
        start_s = time.perf_counter()
        save_sharded(self._directory(SCHEDULED, after))
        self._remove(self._directory(SCHEDULED, after - N_KEPT * every))
        self._context.recorder.sample("save_s", time.perf_counter() - start_s)

    def _directory(self, kind: str, step: int) -> Path:
        return state_directory(self._context.run_dir, kind, step)

    def _remove(self, directory: Path) -> None:
        """Remove this rank's shard; the last rank that shares the disk removes the directory."""
        with suppress(OSError):
            (directory / f"shard{self._context.world.rank}.safetensors").unlink(missing_ok=True)
            directory.rmdir()

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Save this rank's state if the enclosed steps end because another rank died."""
        try:
            yield
        except (PeerError, RuntimeError) as error:
            if self._survivor is not None and (
                isinstance(error, PeerError) or has_lost_peer(error)
            ):
                self._save(self._survivor)
            raise

    def _save(self, survivor: Survivor) -> None:
        try:
            after = self._step + survivor.n_more_steps()
            if after >= 0:
                survivor.save(self._directory(SURVIVORS, after))
        except HarnessError as error:
            _log.warning("this rank's state is not saved: %s", error)

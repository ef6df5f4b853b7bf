"""Write the state of a training, and its copies on second hosts, while the training goes on."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from threading import Thread

import psutil
import torch.distributed as dist

from harness.measure.recorder import Recorder
from harness.runtime.executor.state.shard import StateShard, shard_name
from harness.runtime.ranks.world import World
from harness.workloads.train.copies import copy_to_second_host

_TIMEOUT = timedelta(days=1)  # disks may be slow


class BackgroundSaves:
    """Saves one state after another in a thread; all ranks must make the same calls.

    Samples `save_background_s`, the time from the start of a save to its end.
    """

    def __init__(self, world: World, recorder: Recorder) -> None:
        self._world, self._recorder = world, recorder
        # Of its own, because the steps communicate meanwhile.
        is_copied = len(set(world.hostnames)) > 1
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if is_copied else None
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._duration_s = 0.0

    def start(self, shard: StateShard, directory: Path, outdated: Path | None) -> None:
        """Begin to save a state after the one before is saved; wait for its end where the host has
        no memory for a copy of what training changes.

        Args:
            outdated: directory of a state to delete then.

        Raises:
            Exception: that of the save before.
        """
        self.wait()
        has_room = self._has_room(shard.n_shared_bytes)
        arguments = shard.copied() if has_room else shard, directory, outdated
        self._thread = Thread(target=self._save, args=arguments, daemon=True)
        self._thread.start()
        if not has_room:
            self.wait()

    def wait(self) -> None:
        """Wait until the last state is saved.

        Raises:
            Exception: that of the save.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        self._recorder.sample("save_background_s", self._duration_s)

    def _has_room(self, n_bytes: int) -> bool:
        if self._world.device.type == "cuda":  # training changes what is on the GPU
            return True
        room: int = self._world.memory_bytes - psutil.Process().memory_info().rss
        return n_bytes < room

    def _save(self, shard: StateShard, directory: Path, outdated: Path | None) -> None:
        start_s = time.perf_counter()
        try:
            shard.write(directory)
            if self._group is not None:
                paths = [directory / shard_name(rank) for rank in range(self._world.size)]
                copy_to_second_host(paths, self._world.hostnames, self._group)
            if outdated is not None:
                rmtree(outdated, ignore_errors=True)
        except BaseException as error:
            self._error = error
        self._duration_s = time.perf_counter() - start_s

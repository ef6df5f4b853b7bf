"""Write the state of a training, and its copies on second hosts, while the training goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from threading import Thread

import psutil
import torch
import torch.distributed as dist

from harness.measure.recorder import Recorder
from harness.measure.store import replacing
from harness.runtime.executor.state.shard import StateShard, shard_name
from harness.runtime.ranks.messages import start_messages
from harness.runtime.ranks.sharing import has_size
from harness.runtime.ranks.world import World

_TIMEOUT = timedelta(days=1)  # disks may be slow
# Of a file, at once in the memory of both hosts.
_BLOCK_BYTES = 64 << 20


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


def second_host_of(rank: int, hostnames: Sequence[str]) -> int | None:
    """The rank on the next host that keeps a rank's copy; None if all share a host.

    Args:
        hostnames: of the ranks.
    """
    hosts, own = list(dict.fromkeys(hostnames)), hostnames[rank]
    if len(hosts) == 1:
        return None
    following = hosts[(hosts.index(own) + 1) % len(hosts)]
    there = [k for k, host in enumerate(hostnames) if host == following]
    return there[hostnames[:rank].count(own) % len(there)]


def copy_to_second_host(
    paths: Sequence[Path], hostnames: Sequence[str], group: dist.ProcessGroup
) -> None:
    """Copy each rank's file to the same path on the next host, unless the hosts share a disk; all
    ranks must call it.

    Args:
        paths: by rank, the same on all ranks.
        hostnames: of the ranks, which are on several hosts.
        group: of all ranks, by gloo.

    Raises:
        ResultsError: a copy cannot be written.
    """
    me, keepers = dist.get_rank(group), [second_host_of(k, hostnames) for k in range(len(paths))]
    sizes = [size for (size,) in _gathered([paths[me].stat().st_size], group)]
    kept = [rank for rank, keeper in enumerate(keepers) if keeper == me]
    lacking = [rank in kept and not has_size(paths[rank], n) for rank, n in enumerate(sizes)]
    is_lacking = [any(column) for column in zip(*_gathered(lacking, group), strict=True)]
    with ExitStack() as files:
        copies = {}
        for rank in kept:
            if is_lacking[rank]:
                temporary = files.enter_context(replacing(paths[rank]))
                copies[rank] = files.enter_context(temporary.open("wb"))
        own = files.enter_context(paths[me].open("rb")) if is_lacking[me] else None
        longest = max((sizes[k] for k in (*copies, me) if is_lacking[k]), default=0)
        for at in range(0, longest, _BLOCK_BYTES):
            messages, received = [], {}
            if own is not None and (data := own.read(_BLOCK_BYTES)):
                block = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                messages.append(dist.P2POp(dist.isend, block, keepers[me], group))
            for rank in copies:
                if n_bytes := min(_BLOCK_BYTES, max(0, sizes[rank] - at)):
                    block = torch.empty(n_bytes, dtype=torch.uint8)
                    messages.append(dist.P2POp(dist.irecv, block, rank, group))
                    received[rank] = block
            for work in start_messages(messages):
                work.wait()
            for rank, block in received.items():
                copies[rank].write(block.numpy().tobytes())


def _gathered(values: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's numbers, by rank."""
    mine = torch.tensor(values, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]

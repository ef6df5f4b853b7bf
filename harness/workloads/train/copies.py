"""Copies of each rank's file on a second host, which outlive the first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from harness.measure.store import replacing
from harness.runtime.ranks.sharing import has_size

# Of a file, at once in the memory of both hosts.
_BLOCK_BYTES = 64 << 20


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
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            for rank, block in received.items():
                copies[rank].write(block.numpy().tobytes())


def _gathered(values: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's numbers, by rank."""
    mine = torch.tensor(values, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]

"""Everyone to everyone at once: how long flows take that share interfaces at both of their ends.

    node 0 --> 1, 2      evenly served, each interface is done when its own messages are;
    node 1 --> 0, 2      TCP's flows take turns as they come, and an interface may have
    node 2 --> 0, 1      nothing to carry while another has a queue

Tensor parallelism exchanges like this. One rank of each node takes part; all start at once, as the
executor does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from harness.domain.cluster import Link
from harness.runtime.ranks.agreement import agree_on_maximum
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.world import World

_N_SAMPLES = 9
_START_BYTES, _MOST_BYTES = 1 << 20, 1 << 26
_LEAST_S = 0.05
# Two nodes that send to each other share nothing.
_FEWEST_NODES = 3


@dataclass(frozen=True)
class Crossing:
    """Median seconds until everybody has a message of n_bytes from everybody."""

    ranks: tuple[int, ...]
    n_bytes: int
    duration_s: float

    def crowding(self, names: list[str], links: Iterable[Link]) -> float:
        """Over what the device with most to send or receive takes by its links, one by one.

        Args:
            names: of devices, by rank.
        """
        taking = {names[rank] for rank in self.ranks}
        busy = dict.fromkeys([(name, way) for name in taking for way in ("out", "in")], 0.0)
        latency_s = 0.0
        for link in links:
            if {link.source, link.target} <= taking:
                seconds = self.n_bytes / link.bandwidth_bytes_per_s
                busy[link.source, "out"] += seconds
                busy[link.target, "in"] += seconds
                latency_s = max(latency_s, link.latency_s)
        expected_s = latency_s + max(busy.values())
        return max(1.0, self.duration_s / expected_s) if expected_s else 1.0


def measure_crossing(context: Context) -> Crossing | None:
    """All ranks must call it; None on fewer than three nodes."""
    world = context.world
    ranks = tuple(world.hostnames.index(host) for host in dict.fromkeys(world.hostnames))
    if len(ranks) < _FEWEST_NODES:
        return None
    n_bytes = _START_BYTES
    _exchange(ranks, n_bytes, world)  # opens connections
    while _exchange(ranks, n_bytes, world) < _LEAST_S and n_bytes < _MOST_BYTES:
        n_bytes *= 2
    found: list[float] = []
    for step in range(_N_SAMPLES):
        context.progress.update("everyone to everyone", step, _N_SAMPLES)
        found.append(_exchange(ranks, n_bytes, world))
        context.recorder.sample("crossing_s", found[-1], step=step, n_bytes=n_bytes)
        context.flush()
    context.progress.update("everyone to everyone", _N_SAMPLES, _N_SAMPLES)
    return Crossing(ranks, n_bytes, median(found))


def _exchange(ranks: tuple[int, ...], n_bytes: int, world: World) -> float:
    """Seconds until the slowest of these ranks has everything."""
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    message = torch.zeros(n_bytes // 4, device=device)
    peers = [rank for rank in ranks if rank != world.rank] if world.rank in ranks else []
    moves = [dist.P2POp(dist.irecv, torch.empty_like(message), peer) for peer in peers]
    moves += [dist.P2POp(dist.isend, message, peer) for peer in peers]
    dist.barrier()
    start_s = time.perf_counter()
    for work in dist.batch_isend_irecv(moves) if moves else []:
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return agree_on_maximum([time.perf_counter() - start_s], world)[0]

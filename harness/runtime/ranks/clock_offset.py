"""Estimate the offset of a rank's monotonic clock from rank 0's, as NTP does.

The offset is the midpoint of the shortest of several round trips minus rank 0's reading; its
uncertainty is half of that round trip.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from harness.measure.clock import HostClock
from harness.runtime.ranks.world import World

_N_ROUND_TRIPS = 12


def estimate_offset(round_trips: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Offset and uncertainty in seconds, from (sent, peer's reading, received) triples."""
    sent_s, peer_s, received_s = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return (sent_s + received_s) / 2 - peer_s, (received_s - sent_s) / 2


def _now_s(clock: HostClock) -> float:
    return clock.seconds_at(time.perf_counter_ns())


def _answer_pings(world: World, clock: HostClock) -> None:
    """On rank 0: answer each peer's pings with this clock's reading."""
    reading = torch.zeros(1, dtype=torch.float64, device=world.wire)
    for peer in range(1, world.size):
        for _ in range(_N_ROUND_TRIPS):
            dist.recv(reading, src=peer)
            if world.wire.type == "cuda":
                torch.cuda.synchronize()
            dist.send(torch.full_like(reading, _now_s(clock)), dst=peer)


def _ping(world: World, clock: HostClock) -> tuple[float, float]:
    reading = torch.zeros(1, dtype=torch.float64, device=world.wire)
    trips = []
    for _ in range(_N_ROUND_TRIPS):
        sent_s = _now_s(clock)
        dist.send(reading, dst=0)
        dist.recv(reading, src=0)
        peer_s = float(reading.item())
        trips.append((sent_s, peer_s, _now_s(clock)))
    return estimate_offset(trips)


def measure_clock_offset(world: World, clock: HostClock) -> tuple[float, float]:
    """Seconds to subtract from this rank's times to get rank 0's, and the uncertainty.

    All ranks must call it, after the process group is initialized; blocks.
    """
    if world.size == 1 or dist.get_world_size() == 1:
        return 0.0, 0.0
    if world.rank == 0:
        _answer_pings(world, clock)
        return 0.0, 0.0
    return _ping(world, clock)

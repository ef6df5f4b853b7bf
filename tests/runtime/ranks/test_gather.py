"""The shortest round trip decides the offset."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.errors import StrategyError
from harness.measure.recorder import HostClock
from harness.runtime.executor.cache.boundary import UncachedError
from harness.runtime.ranks import gather
from harness.runtime.ranks.gather import estimate_offset, measure_clock_offset


def test_the_shortest_round_trip_decides():
    trips = [(0.0, 105.0, 10.0), (20.0, 121.0, 22.0), (30.0, 139.0, 39.0)]
    offset_s, error_s = estimate_offset(trips)
    assert offset_s == pytest.approx(21.0 - 121.0)
    assert error_s == pytest.approx(1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_readings_travel_in_the_memory_that_the_backend_moves(rank, monkeypatch):
    host, moved = torch.device("cpu"), []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "send", lambda reading, dst: moved.append(reading.device))
    monkeypatch.setattr(dist, "recv", lambda reading, src: moved.append(reading.device))
    world = SimpleNamespace(rank=rank, size=2, device=torch.device("cuda"), wire=host)
    measure_clock_offset(world, HostClock())
    assert moved == [host] * 24


def test_an_error_of_one_module_travels_as_the_class_that_it_derives_from(monkeypatch):
    world = SimpleNamespace(rank=0, size=1, is_first=True, wire=torch.device("cpu"))
    monkeypatch.setattr(gather, "gather_bytes", lambda data, world: [data])

    def refuse() -> None:
        raise UncachedError("features are cut")

    with pytest.raises(StrategyError, match="features are cut"):
        gather.broadcast_result(refuse, None, world)

"""What an exception says of itself and of other ranks; clocks and failures over rank 0's store."""

import json
import os
import signal
import time
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed import TCPStore

from harness.domain.graph import Graph
from harness.errors import LaunchError, PeerError, StrategyError
from harness.measure.recorder import HostClock
from harness.runtime.executor.cache.boundary import UncachedError
from harness.runtime.ranks import gather
from harness.runtime.ranks.control import Control
from harness.runtime.ranks.failures import gist, has_lost_peer, has_timed_out, located
from harness.runtime.ranks.gather import estimate_offset, measure_clock_offset

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:17035. This is typically caused by a remote worker crashing. Check the logs "
    "of the remote worker before reporting an error. GLHF!"
)


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("prefix", ["", "Got the following error when running the callback: Runt"])
def test_an_error_of_gloo_says_what_happened_and_no_more(prefix):
    error = RuntimeError((f"{prefix}imeError: " if prefix else "") + CLOSED)
    assert gist(error) == "Connection closed by peer [127.0.0.1]:17035"
    assert has_lost_peer(error)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("Gloo connectFullMesh failed with [/x/tcp/pair.cc:144] no error"), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was closed."), True),
        (KeyError("closed by peer"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_group_fails_for_want_of_a_peer_or_by_an_exception_of_its_own(error, is_lost):
    assert has_lost_peer(error) == is_lost


def test_a_group_that_waited_too_long_is_told_from_one_that_lost_a_peer():
    error = RuntimeError("[/x/tcp/pair.cc:525] Application timeout caused pair closure")
    assert has_timed_out(error)
    assert not has_timed_out(RuntimeError(CLOSED))


def test_the_line_of_the_user_is_named_below_which_torch_and_python_raise():
    def mistaken():
        json.loads("{")

    first = located(caught(mistaken)).splitlines()[0]
    assert first.startswith("JSONDecodeError: Expecting property name")
    assert "(test_failures.py:" in first
    assert first.endswith(' in mistaken: json.loads("{"))')


def test_a_place_that_the_message_names_and_pythons_own_lines_are_left_out():
    first = located(caught(lambda: compile("def f(:", "nets.py", "exec"))).splitlines()[0]
    assert first == "SyntaxError: invalid syntax (nets.py, line 1)"
    assert "(test_failures.py:" in located(caught(lambda: os.environ["NO_SUCH"])).splitlines()[0]


def test_the_line_of_a_captured_graph_is_named_where_a_user_has_none():
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    fault = caught(lambda: model.forward(torch.zeros(2, 3)))
    fault.__traceback__ = fault.__traceback__.tb_next.tb_next  # what calls it is this test
    first, *rest = located(fault).splitlines()
    assert first.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert " (a captured graph:" in first
    assert 'getattr(self, "0")(input_1)' in first
    assert rest[0] == "Traceback (most recent call last):"


def test_the_line_of_the_harness_is_named_where_nobody_else_has_one():
    fault = caught(lambda: Graph.from_unordered("x", None, batch=1))
    fault.__traceback__ = fault.__traceback__.tb_next.tb_next
    assert "(graph.py:" in located(fault)


@pytest.mark.parametrize(
    ("message", "wanted", "then"),
    [
        ("one\ntwo", "one", "two"),
        # TorchInductor's announces the cause.
        ("'inductor' raised:\nTypeError: no\n\nadvice", "'inductor' raised: TypeError: no", ""),
    ],
)
def test_lines_after_the_first_stay_after_it_but_for_its_cause(message, wanted, then):
    def mistaken():
        raise RuntimeError(message)

    first, second, *_ = located(caught(mistaken)).splitlines()
    assert first.startswith(f"RuntimeError: {wanted} (test_failures.py:")
    assert second == then


def test_a_rank_whose_store_is_gone_names_rank_0_in_one_line():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
    control = Control(store, 1, 2)
    control.report_failure("run", "(b) it broke")
    assert control.read_failure("run") == "1 (b) it broke"
    del server
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 1 lost rank 0, which has ended") as error:
            control.read_failure("run")
        assert "\n" not in str(error.value)


def test_no_rank_leaves_while_rank_0_works():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = Thread(target=Control(store.clone(), 1, 2).leave)
    other.start()
    with pytest.raises(dist.DistStoreError):
        store.wait(["left/1"], timedelta(seconds=0.1))
    Control(store, 0, 2).leave()
    other.join()


def test_a_rank_that_waits_for_rank_0_is_soon_interrupted():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    start_s = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            Control(store, 1, 2).leave()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start_s < 10


def test_ranks_that_never_come_are_named():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("here/2", "1")
    with pytest.raises(LaunchError, match="these have not come within 1 s: 1, 3; look"):
        Control(store, 0, 4).await_all(1.0)
    for rank in (1, 3):
        store.set(f"here/{rank}", "1")
    Control(store, 0, 4).await_all(0.0)


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

"""Which silence, end or stop of a rank ends a launch, by a clock that the test moves."""

import contextlib
import json
import os
import socket
import time

import pytest

from harness.runtime.agent.peers import Fault, Hub, Spoke
from harness.runtime.agent.wire import Wire

HOSTS = ["a", "b", "b", "c"]
LIMIT_S = 10.0


class Star:
    """A hub and some spokes on loopback."""

    def __init__(self, ranks=(1, 2, 3), token="secret"):
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.hub = Hub(listener, "secret", HOSTS, LIMIT_S, 0.0)
        self.spokes = {
            rank: Spoke(self.connect(), rank, "a", token, LIMIT_S, 0.0) for rank in ranks
        }

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port))

    def hear(self, now_s):
        """The hub gets what has been sent."""
        time.sleep(0.05)  # loopback
        self.hub.receive(now_s)

    def beat(self, now_s, silent=(), state=None):
        """Everyone who is not silent beats, and hears the others."""
        for rank, spoke in self.spokes.items():
            if rank not in silent:
                spoke.beat((state or {}).get(rank, {}))
        self.hear(now_s)
        self.hub.beat({})
        self.tell(now_s, silent)

    def tell(self, now_s, silent=()):
        """Everyone who is not silent gets what the hub has sent."""
        time.sleep(0.05)
        for rank in self.spokes.keys() - set(silent):
            self.spokes[rank].receive(now_s)


@pytest.fixture
def star():
    """One whose ranks have all been heard at 1 s."""
    made = Star()
    made.beat(1.0)
    return made


def test_a_silent_host_is_named_with_all_its_ranks_and_when_it_was_heard(star):
    star.beat(9.0, silent=(1, 2))
    assert star.hub.judge(10.9) is None
    fault = star.hub.judge(11.5)
    assert fault.status == "timeout"
    assert fault.reason.startswith("rank 1 (b), rank 2 (b): no heartbeat for 10 s")
    assert " last heard at " in fault.reason
    assert fault.silent_hosts == ("b",)


def test_a_rank_that_never_connects_counts_from_the_meeting():
    star = Star(ranks=(1, 2))
    star.beat(9.0)
    fault = star.hub.judge(10.5)
    assert "rank 3 (c)" in fault.reason


def test_a_spoke_that_rank_0_does_not_reach_ends_itself(star):
    star.beat(9.0, silent=(1,))
    fault = star.spokes[1].judge(11.5)
    assert "no heartbeat from rank 0" in fault.reason
    assert fault.silent_hosts == ("a",)
    assert star.spokes[3].judge(11.5) is None
    star.spokes[1]._wire.close()
    star.hear(11.5)  # rank 0 lives, but was slow
    found = star.hub.judge(11.5)
    assert found.reason.startswith("rank 1 got no heartbeat from rank 0 for 10 s")
    assert (found.status, found.silent_hosts) == ("timeout", ())


def test_a_connection_that_closes_without_a_goodbye_is_a_killed_agent(star):
    star.spokes[3]._wire.close()
    star.hear(2.0)
    fault = star.hub.judge(2.0)
    assert fault.reason == "rank 3 (c): its agent was killed: the connection to it closed"


def test_a_rank_that_has_left_may_close_its_connection(star):
    star.spokes[3].notify({"left": True})
    star.spokes[3]._wire.close()
    star.hear(2.0)
    assert star.hub.judge(2.0) is None
    star.beat(60.0, silent=(3,))
    assert star.hub.judge(60.0) is None


def test_a_hub_that_closes_ends_the_others_unless_they_have_left(star):
    star.spokes[1].notify({"left": True})
    for wire in star.hub.wires():
        wire.close()
    star.tell(2.0)
    assert star.spokes[1].judge(2.0) is None
    fault = star.spokes[2].judge(2.0)
    assert "rank 0 is gone" in fault.reason


def test_the_end_reaches_everyone_with_the_hosts_that_do_not_answer(star):
    star.hub.notify(Fault("crash", "rank 1 (b): killed", ("b",), 137).message())
    star.tell(1.0)
    for spoke in star.spokes.values():
        assert spoke.judge(1.0) == ("crash", "rank 1 (b): killed", ("b",), 137)


def test_a_fault_that_a_rank_reports_waits_for_its_grace(star):
    fault = Fault("oom", "rank 2 (b): memory", exit_code=137)
    star.spokes[2].notify(fault.message(grace_s=3.0))
    star.hear(2.0)
    assert star.hub.judge(4.0) is None
    assert star.hub.pending() == fault
    assert star.hub.judge(5.0) == fault
    star.hub.forget_faults()
    assert star.hub.judge(5.0) is None


def test_the_loss_of_another_rank_is_a_reason_only_if_no_rank_has_its_own(star):
    star.spokes[1].notify(Fault("skipped", "rank 1 (b): lost rank 0").message(grace_s=3.0))
    star.hear(1.0)
    assert star.hub.primary() is None
    lost = Fault("crash", "rank 1 (b): lost rank 0")
    assert star.hub.pending() == star.hub.judge(4.0) == lost
    own = Fault("oom", "rank 2 (b): memory")
    star.spokes[2].notify(own.message(grace_s=4.0))
    star.hear(1.0)
    assert star.hub.primary() == star.hub.pending() == star.hub.judge(4.0) == own


def test_a_rank_whose_program_is_stopped_for_too_long_is_named():
    star = Star()
    star.beat(1.0, state={1: {"stopped_s": 9.0}})
    assert star.hub.judge(1.0) is None
    star.beat(2.0, state={1: {"stopped_s": 10.5}})
    fault = star.hub.judge(2.0)
    assert fault.reason.startswith("rank 1 (b): its first process has been stopped (SIGSTOP")


@pytest.mark.parametrize(
    "hello",
    [
        {"rank": 1, "token": "guess"},
        {"rank": 7, "token": "secret"},
        {"rank": "1", "token": "secret"},
        {"rank": 1, "token": 5},
        {"fault": ["crash", "x", [], 1]},
        [],
    ],
)
def test_a_stranger_is_nobody(hello):
    star = Star(ranks=(2, 3))
    stranger = star.connect()
    stranger.sendall(json.dumps(hello).encode() + b"\n")
    stranger.sendall(b'{"fault": ["crash", "x", [], 1]}\n')
    star.beat(1.0)
    assert star.hub.judge(1.0) is None
    stranger.settimeout(5.0)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""


def test_a_stranger_who_says_nothing_is_let_go_after_the_limit():
    star = Star()
    stranger = star.connect()
    star.beat(1.0)
    star.beat(12.0)
    stranger.settimeout(5.0)
    assert stranger.recv(1) == b""


def test_tcp_gives_up_a_silent_peer_after_the_limit_only():
    star = Star(ranks=(1,))
    star.beat(1.0)
    for wire in (*star.hub.wires()[1:], *star.spokes[1].wires()):
        with socket.socket(fileno=os.dup(wire.fileno())) as connection:
            timeout_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert timeout_ms == 2000 * LIMIT_S


def test_a_beat_waits_for_nothing_and_what_must_arrive_arrives_whole():
    ours, theirs = socket.socketpair()
    sender, receiver = Wire(ours, 30.0), Wire(theirs, 30.0)
    long = "x" * 300_000  # more than the buffers hold
    sender.send({"long": long})
    for _ in range(100):
        sender.send({"beat": 1}, is_urgent=False)
    found = receiver.receive()
    assert found == []
    for _ in range(50):  # each beat pushes on what waits
        sender.send({"beat": 2}, is_urgent=False)
        found += receiver.receive()
    assert found[0] == {"long": long}
    assert found[-1] == {"beat": 2}
    assert {"beat": 1} not in found

"""Groups and transfers of a rank, and what it is told when others do not answer, without others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.domain.schedule import rank_actions
from harness.errors import ConfigError, PeerError, StrategyError
from harness.measure.recorder import HostClock, Recorder
from harness.runtime.executor.gradients.sums import GradientSync, SumBucket, SumGroups
from harness.runtime.executor.transport.channels import Channels, Transfer
from harness.runtime.executor.transport.groups import Groups
from harness.runtime.executor.transport.messages import End, Message
from harness.runtime.executor.transport.moves import Receives


class FakeWorld(msgspec.Struct):
    backend: str = "gloo"
    rank: int = 0
    size: int = 3
    device: torch.device = torch.device("cpu")
    wire: torch.device = torch.device("cpu")
    is_bounded: bool = False


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def queues(monkeypatch):
    monkeypatch.setenv(QUEUES, "32")


def channels_of(world, messages=(), **groups):
    return Channels(world, list(messages), Groups(world, 7.0), lambda *_: 0, **groups)


def message(number=0, sender=0, reader=1, *, is_backward=False, after=0, before=0):
    return Message(
        number=number, is_backward=is_backward, sender=End(sender, sender),
        reader=End(reader, reader), after=after, before=before, order=(0, 0, number),
        dtype=torch.float32, is_rounded=True, routes=(mock.Mock(shape=(2,), n_elements=2),),
    )  # fmt: skip


def both_ways(number=0, sender=0, reader=1):
    back = message(number + 1, reader, sender, is_backward=True)
    return [message(number, sender, reader), back]


class LostWork:
    """A sum that fails without a word."""

    def get_future(self):
        return self

    def then(self, finish):
        return self

    def wait(self):
        raise RuntimeError("")


class Fabric:
    """Stands in for torch.distributed: notes which groups are made, and what meets where."""

    def __init__(self, monkeypatch):
        self.made, self.used, self.destroyed = [], [], []
        for name in (
            "new_group", "send", "recv", "all_reduce", "destroy_process_group", "batch_isend_irecv",
        ):  # fmt: skip
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "P2POp", lambda way, _, peer, group: (way.__name__, peer, group))

    def new_group(self, ranks, timeout):
        self.made.append((ranks, timeout))
        return len(self.made) - 1

    def send(self, tensor, peer, group):
        self.used.append(("send", peer, group))

    def recv(self, tensor, peer, group):
        self.used.append(("recv", peer, group))

    def all_reduce(self, tensor, group):
        if tensor.numel() == 1:
            self.used.append(("sum", None, group))

    def batch_isend_irecv(self, messages):
        self.used.extend(messages)
        return [mock.Mock()]

    def destroy_process_group(self, group):
        self.destroyed.append(group)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_group_has_the_timeout_of_the_plan(backend, monkeypatch):
    fabric = Fabric(monkeypatch)
    channels_of(FakeWorld(backend), both_ways(), sums={(0, 1, 2)}, collectives={(0,), (0, 1)})
    assert {timeout for _, timeout in fabric.made} == {timedelta(seconds=7)}
    pairs = [[0, 1], [1, 0]] if backend == "nccl" else []
    assert [ranks for ranks, _ in fabric.made] == [*pairs, [0, 1, 2], [0, 1]]


def test_ranks_meet_in_each_group_as_it_is_made(monkeypatch):
    messages = [*both_ways(0, 0, 1), *both_ways(2, 1, 2), *both_ways(4, 0, 2)]
    used = []
    for rank in range(3):
        fabric = Fabric(monkeypatch)
        channels_of(FakeWorld("nccl", rank), messages, sums={(0, 1)})
        used.append(fabric.used)
    assert used[0] == [
        ("send", 1, 0), ("send", 2, 1), ("recv", 1, 2), ("recv", 2, 4), ("sum", None, 6),
    ]  # fmt: skip
    # Each group is met in by both of its ranks, and by all in the order of its making.
    assert [group for *_, group in used[1]] == [0, 2, 3, 5, 6]
    assert used[2] == [("recv", 0, 1), ("recv", 1, 3), ("send", 0, 4), ("send", 1, 5)]


def test_devices_of_one_stage_share_a_group_for_both_passes(monkeypatch):
    fabric = Fabric(monkeypatch)
    ends = End(0, 0), End(1, 0)
    messages = [
        replace(message(is_backward=is_backward), sender=sender, reader=reader)
        for sender, reader in (ends, ends[::-1])
        for is_backward in (False, True)
    ]
    channels_of(FakeWorld("nccl", 0), messages)
    assert [ranks for ranks, _ in fabric.made] == [[0, 1], [1, 0]]


def test_devices_that_pass_keys_or_weights_on_are_connected_in_pairs(monkeypatch):
    # NCCL connects two ranks for messages at their first message, not at a sum.
    fabric = Fabric(monkeypatch)
    channels_of(FakeWorld("nccl", 1), collectives={(0, 1, 2)})
    ways = ("isend", "irecv")
    assert fabric.used == [("sum", None, 0), *((way, peer, 0) for peer in (0, 2) for way in ways)]
    fabric = Fabric(monkeypatch)
    channels_of(FakeWorld("gloo", 1), collectives={(0, 1, 2)})
    assert fabric.used == []


def test_more_groups_than_streams_are_refused_on_every_rank(monkeypatch):
    for rank in range(2):
        fabric = Fabric(monkeypatch)
        groups = Groups(FakeWorld("nccl", rank), 7.0)
        for reader in range(1, 33):
            groups.for_transfers(0, reader)
        with pytest.raises(StrategyError, match="rank 0 needs 33 process groups or more"):
            groups.for_sums((0, 1))
        assert len(fabric.made) == 32


def test_calls_that_wait_for_the_gpu_are_refused_under_nccl(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    Groups(FakeWorld(), 7.0)
    with pytest.raises(ConfigError, match="CUDA_LAUNCH_BLOCKING=1 makes a receive"):
        Groups(FakeWorld("nccl"), 7.0)


@pytest.mark.parametrize("n_queues", ["1", None])
def test_few_hardware_queues_are_refused_for_messages_under_nccl(monkeypatch, n_queues):
    Fabric(monkeypatch)
    monkeypatch.delenv(QUEUES)
    if n_queues is not None:
        monkeypatch.setenv(QUEUES, n_queues)
    Groups(FakeWorld("nccl"), 7.0).for_sums((0, 1))
    Groups(FakeWorld(), 7.0).for_transfers(0, 1)
    with pytest.raises(ConfigError, match=f"{QUEUES} is {n_queues or 8}, so streams"):
        Groups(FakeWorld("nccl"), 7.0).for_transfers(0, 1)


def test_a_group_of_all_is_made_where_streams_or_timeouts_count(monkeypatch):
    fabric = Fabric(monkeypatch)
    Groups(FakeWorld(), 7.0).for_gradients((0, 1, 2))
    assert fabric.made == []
    for n, world in enumerate((FakeWorld("nccl"), FakeWorld(is_bounded=True)), start=1):
        Groups(world, 7.0).for_gradients((0, 1, 2))
        assert [ranks for ranks, _ in fabric.made] == [[0, 1, 2]] * n


def test_groups_are_let_go_of_together(monkeypatch):
    fabric = Fabric(monkeypatch)
    groups = Groups(FakeWorld(), 7.0)
    groups.for_sums((0, 1))
    groups.for_transfers(0, 1)
    groups.close()
    groups.close()
    assert fabric.destroyed == [0, 1]


def test_gloo_tells_transfers_by_tag_and_nccl_by_group(monkeypatch):
    Fabric(monkeypatch)
    told = []
    monkeypatch.setattr(dist, "isend", lambda tensor, rank, **where: told.append((rank, where)))
    monkeypatch.setattr(dist, "irecv", lambda tensor, rank, **where: told.append((rank, where)))
    sent, received = both_ways(2)
    for backend in ("gloo", "nccl"):
        channels = channels_of(FakeWorld(backend), [*both_ways(), sent, received])
        channels.send(torch.zeros(2), sent, 3)
        channels.receive(received, torch.float32, 3)
    assert told == [(1, {"tag": 14}), (1, {"tag": 15}), (1, {"group": 0}), (1, {"group": 1})]


def test_a_gpu_sends_over_gloo_from_the_host_and_is_sent_there(monkeypatch):
    # The meta device plays the GPU; to send, the host does, since nothing is copied from there.
    moved = []
    monkeypatch.setattr(dist, "isend", lambda tensor, *_, **__: moved.append(tensor.device))
    monkeypatch.setattr(dist, "irecv", lambda buffer, *_, **__: moved.append(buffer.device))
    monkeypatch.setattr(Channels, "_wait", lambda *_: None)
    host, gpu = torch.device("cpu"), torch.device("meta")
    channels = channels_of(FakeWorld(device=gpu, wire=host))
    sent, received = both_ways()
    transfer = channels.receive(received, torch.float32, 0)
    channels.wait(transfer)
    assert (moved, transfer.buffer.device) == ([host], gpu)
    channels_of(FakeWorld(device=host, wire=gpu)).send(torch.zeros(2), sent, 0)
    assert moved == [host, gpu]


def test_who_meets_a_dead_rank_says_what_it_posted(monkeypatch):
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, mock.Mock(side_effect=RuntimeError("closed by peer")))
    there, back = both_ways()
    for one in (there, back):
        one.routes[0].piece.part.operator = "conv1"
    channels = channels_of(FakeWorld())
    with pytest.raises(PeerError, match=r"the output of conv1 .* to rank 1.*closed") as sent:
        channels.send(torch.zeros(2), there, 4)
    with pytest.raises(PeerError, match=r"the gradient of conv1 .* from rank 1.*closed") as posted:
        channels.receive(back, torch.float32, 4)
    assert sent.value.peers == posted.value.peers == (1,)


@pytest.mark.parametrize(
    ("is_collective", "error", "told"),
    [(False, "closed by peer", "closed by peer"), (True, "", "RuntimeError")],
)
def test_a_sum_that_cannot_start_says_of_what_and_for_whom(is_collective, error, told, monkeypatch):
    with mock.patch.object(dist, "new_group"):
        channels = channels_of(FakeWorld(), sums={(0, 1)}, collectives={(0, 1)})
    monkeypatch.setattr(dist, "all_reduce", mock.Mock(side_effect=RuntimeError(error)))
    with pytest.raises(PeerError, match=rf"the sum of add over ranks \[0, 1\].*{told}"):
        channels.start_sum(torch.zeros(2), "add", (0, 1), is_collective=is_collective)


def test_a_message_tells_which_sends_its_sender_has_read(monkeypatch):
    monkeypatch.setattr(dist, "isend", mock.Mock())
    monkeypatch.setattr(dist, "irecv", mock.Mock())
    channels = channels_of(FakeWorld())
    for k in range(3):  # read before segments 0, 1 and 2 of rank 1
        channels.send(torch.zeros(2), message(k, before=k), 0)
    answer = message(3, 1, 0, after=1)
    channels.wait(channels.receive(answer, torch.float32, 0))
    assert [one.read_at for one in channels._sending[1]] == [(0, 2)]


def sync_of(world, parameter, recorder):
    """Sums one weight over ranks 0 and 1."""
    queues = {(0, 1): [SumBucket("bucket0", "weight", [parameter])]}
    return GradientSync(world, queues, {(0, 1): SumGroups(None)}, [{parameter: 1}], recorder)


def test_a_sum_of_gradients_may_fail_without_a_word():
    parameter = nn.Parameter(torch.ones(2))
    sync = sync_of(FakeWorld(), parameter, Recorder(HostClock()))
    sync.start_step()
    with mock.patch.object(dist, "all_reduce", return_value=LostWork()):
        (2 * parameter).sum().backward()
    with pytest.raises(
        PeerError, match=r"gradients of weight over ranks \[0, 1\] failed .RuntimeError"
    ):
        sync.finish()


def test_nccl_is_not_asked_to_call_back():
    # It would on a stream of its own pool: a group that has the same one would wait for the sum.
    parameter, work = nn.Parameter(torch.ones(2)), mock.Mock()
    recorder = Recorder(HostClock())
    sync = sync_of(FakeWorld("nccl"), parameter, recorder)
    sync.start_step()
    with mock.patch.object(dist, "all_reduce", return_value=work):
        (2 * parameter).sum().backward()
    sync.finish()
    assert work.mock_calls == [mock.call.wait()]
    (span,) = recorder.collect()
    assert (span.kind, span.name, span.n_bytes) == ("communication", "bucket0", 8)


@pytest.mark.parametrize(
    ("backend", "told"), [("gloo", [mock.call(timedelta(seconds=7))]), ("nccl", [mock.call()])]
)
def test_the_host_waits_under_gloo_alone(backend, told, monkeypatch):
    Fabric(monkeypatch)
    work = mock.Mock()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, async_op=False: work)
    channels_of(FakeWorld(backend), sums={(0, 1)}).start_sum(torch.zeros(2), "add", (0, 1))()
    assert work.wait.mock_calls == told


@pytest.mark.parametrize(
    ("schedule", "rank", "n_posted"), [("1f1b", 0, 2), ("1f1b", 1, 2), ("gpipe", 0, 7)]
)
def test_no_receive_is_posted_before_its_sender_can_have_what_it_needs(schedule, rank, n_posted):
    sizes = {"n_stages": 2, "n_microbatches": 8, "n_ranks": 2}
    order = {
        (action.stage, action.microbatch, action.kind == "backward"): at
        for k in range(2)
        for at, action in enumerate(rank_actions(schedule, **sizes, rank=k))
    }
    world, (out, back) = FakeWorld(rank=rank, size=2), both_ways()
    channels = Channels(world, [out, back], Groups(world, 7.0), lambda *of: order[of])
    moves = mock.Mock()
    of_pass = [[out], [back]]
    moves.received = lambda stage, *, is_backward: of_pass[is_backward][: stage != is_backward]
    moves.sent = lambda stage, *, is_backward: of_pass[is_backward][: stage == is_backward]
    moves.exchanges = lambda *of, **way: [[one] for one in moves.received(*of, **way)]
    moves.message_of = lambda route, *, is_backward: back if is_backward else out
    phases = mock.Mock(wait=lambda wait, **_: wait())
    channels.receive = lambda message, *_: Transfer(None, torch.zeros(2), message, str, (0, 0))
    most = 0

    def wait(transfer):
        nonlocal most
        most = max(most, len(receives._transfers))
        transfer.pieces = {0: transfer.buffer}

    channels.wait = wait
    actions = list(rank_actions(schedule, **sizes, rank=rank))
    receives = Receives(
        actions, lambda _: (None, moves), 8, channels, phases, lambda _: torch.float32, 0
    )
    receives.start(0)
    for action in actions:
        if moves.received(action.stage, is_backward=action.kind == "backward"):
            receives.take(action.microbatch, mock.Mock(number=0), is_backward=rank == 0)
    receives.finish()
    assert most == n_posted

import pytest
import torch.distributed as dist

from harness.runtime.ranks.messages import PendingMessages, start_messages


class Message:
    def __init__(self, op):
        self.op = op


class Work:
    def __init__(self, error=None):
        self.error = error

    def wait(self):
        if self.error is not None:
            raise self.error


def test_receives_start_before_sends(monkeypatch):
    monkeypatch.setattr(dist, "batch_isend_irecv", list)
    sends, receives = ([Message(way) for _ in range(2)] for way in (dist.isend, dist.irecv))
    mixed = [sends[0], receives[0], sends[1], receives[1]]
    assert start_messages(mixed) == [*receives, *sends]
    assert start_messages([]) == []


def test_messages_end_as_one_work():
    assert PendingMessages([Work(), Work()]).get_future().wait() is None
    lost = PendingMessages([Work(), Work(RuntimeError("closed by peer"))])
    with pytest.raises(RuntimeError, match="closed by peer"):
        lost.get_future().wait()

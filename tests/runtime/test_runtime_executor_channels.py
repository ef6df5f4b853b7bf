"""What ranks are told when others do not answer, without others."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.errors import PeerError
from harness.measure.clock import HostClock
from harness.measure.recorder import Recorder
from harness.runtime.executor.channels import Channels
from harness.runtime.executor.gradients import GradientSync
from harness.runtime.executor.messages import Message
from harness.runtime.executor.weight_gradients import GradientHomes


class FakeWorld(msgspec.Struct):
    backend: str = "gloo"
    rank: int = 0
    device: torch.device = torch.device("cpu")


class LostWork:
    """A sum that fails without a word."""

    def get_future(self):
        return self

    def then(self, finish):
        return self

    def wait(self):
        raise RuntimeError("")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_group_has_the_timeout_of_the_plan(backend):
    message = Message(
        number=0, source=0, target=1, source_stage=0, target_stage=1, after=0, last=0, before=0,
        dtype=torch.float32, entries=(), returning=(),
    )  # fmt: skip
    with mock.patch.object(dist, "new_group") as made:
        channels = Channels(FakeWorld(backend), [message], 7.0, {})
        channels.make_groups_of_sums({(0, 1, 2)})
        channels.make_groups_of_norms({(0,), (0, 1)})
    assert {call.kwargs["timeout"] for call in made.mock_calls} == {timedelta(seconds=7)}
    pairs = 2 * [[0, 1]] if backend == "nccl" else []
    assert [call.args[0] for call in made.mock_calls] == [*pairs, [0, 1, 2], [0, 1]]


def test_a_batch_norm_that_waits_in_vain_says_for_whom():
    with mock.patch.object(dist, "new_group"):
        channels = Channels(FakeWorld(), [], 7.0, {})
        channels.make_groups_of_norms({(0, 3)})
    with (
        mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("")),
        pytest.raises(PeerError, match=r"batch norm statistics over ranks \[0, 3\].*RuntimeError"),
    ):
        channels.add_up_norm(torch.zeros(2), (0, 3))


def test_a_sum_of_gradients_may_fail_without_a_word():
    parameter = nn.Parameter(torch.ones(2))
    recorder, homes = Recorder(HostClock()), GradientHomes()
    sync = GradientSync(
        [("weight", parameter, (0, 1))], {(0, 1): None}, {parameter: 1}, recorder, 8, homes
    )
    sync.start_step()
    with mock.patch.object(dist, "all_reduce", return_value=LostWork()):
        (2 * parameter).sum().backward()
    with pytest.raises(
        PeerError, match=r"gradients of weight over ranks \[0, 1\] failed .RuntimeError"
    ):
        sync.finish()


@pytest.mark.parametrize(
    ("backend", "told"), [("gloo", [mock.call(timedelta(seconds=7))]), ("nccl", [mock.call()])]
)
def test_the_host_waits_under_gloo_alone(backend, told):
    channels, work = Channels(FakeWorld(backend), [], 7.0, {}), mock.Mock()
    channels.wait_for_sum(work, "add", (0, 1))
    assert work.wait.mock_calls == told

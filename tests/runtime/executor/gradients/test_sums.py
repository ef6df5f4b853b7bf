"""Gradients: those that are summed together, and those of a segment's inputs that share memory."""

import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.domain.routes import BUCKET_BYTES, first_bucket_bytes
from harness.measure.recorder import HostClock, Recorder
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.sums import (
    GradientSync,
    SumBucket,
    SumGroups,
    bucketed,
)
from harness.runtime.executor.program.program import PartKey
from harness.runtime.executor.run.flight import Flight
from harness.runtime.executor.sharded.owners import SharedSlice
from harness.runtime.executor.sharded.scatters import ScatterBucket
from harness.runtime.executor.shards.regions import Region


@pytest.mark.parametrize("cap", [BUCKET_BYTES, 4 << 20, 1 << 16])
def test_buckets_are_those_of_ddp(cap):
    draw = random.Random(0)
    # DDP's own constructor: a named size is the first bucket's too.
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if cap == BUCKET_BYTES else cap
    assert first_bucket_bytes(cap) == first
    for _ in range(50):
        sizes = [2 ** draw.randrange(24) for _ in range(draw.randrange(1, 30))]
        parameters = [nn.Parameter(torch.empty(n, device="meta")) for n in sizes]
        tensors = [torch.empty(1).expand(n) for n in sizes]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap])
        number = {parameter: i for i, parameter in enumerate(parameters)}
        assert [[number[p] for p in one] for one in bucketed(parameters, cap)] == theirs


def test_gradients_lie_in_a_bucket_as_their_parameters_do_in_memory():
    # Fused optimizers refuse a gradient of another order.
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    parameters = [conv.bias, conv.weight, nn.Parameter(torch.zeros(3, 2).t())]
    bucket = SumBucket("bucket0", "", parameters)
    assert [bucket.views[p].stride() for p in parameters] == [p.stride() for p in parameters]
    for number, parameter in enumerate(parameters, start=1):
        parameter.grad = torch.full_like(parameter, number)
    bucket.collect()
    assert bucket.flat.tolist() == [1.0] * 4 + [2.0] * 48 + [3.0] * 6
    assert all(parameter.grad is bucket.views[parameter] for parameter in parameters)


def test_microbatches_add_to_gradients_within_their_bucket():
    """A gradient beside its bucket would take the memory of all weights a second time."""
    parameter = nn.Parameter(torch.zeros(2))
    bucket = SumBucket("bucket0", "", [parameter])
    world: Any = SimpleNamespace(backend="gloo", device=torch.device("cpu"))
    groups, rounds = {(0, 1): SumGroups(None)}, [{parameter: 3}]
    sync = GradientSync(world, {(0, 1): [bucket]}, groups, rounds, Recorder(HostClock()))
    sync.start_step(is_muted=True)
    for number in (1.0, 2.0):
        (number * parameter).sum().backward()
        assert parameter.grad is bucket.views[parameter]
    assert bucket.flat.tolist() == [3.0, 3.0]


class Message(NamedTuple):
    op: Any
    tensor: torch.Tensor


def scattered_over_two(parameter, backend, *reduced):
    """A bucket of one parameter, and the part of it that rank 0 owns."""
    piece = WeightSlice.whole("w", parameter)
    parts = tuple(piece.part(k, 2) for k in range(2))
    own = nn.Parameter(parts[0].take(parameter.detach()).clone())
    slices = [SharedSlice(piece, parameter, (0, 1), parts, own, 0)]
    world = SimpleNamespace(backend=backend)
    return ScatterBucket("bucket0", slices, [(0, 1)], world, *reduced), own


def test_fp32_gradients_are_sent_as_bf16_on_request(monkeypatch):
    seen = []

    def double(tensor, **_):
        seen.append(tensor.dtype)
        tensor.mul_(2)

    def exchange(messages):
        (_, received), (_, sent) = messages
        seen.append(sent.dtype)
        received.copy_(sent)
        return [SimpleNamespace(wait=lambda: None)]

    monkeypatch.setattr(dist, "all_reduce", double)
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, *_: Message(op, tensor))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    value = 1 + 2**-12  # bf16 keeps 8 bits
    parameter = nn.Parameter(torch.zeros(2, 2))
    whole = SumBucket("bucket0", "", [parameter], "bf16")
    scattered, own = scattered_over_two(parameter, "gloo", "bf16")
    for bucket in (whole, scattered):
        parameter.grad = torch.full((2, 2), value)
        bucket.collect()
        bucket.pack()
        if work := bucket.start(None):
            work.get_future().wait()
        bucket.finish()
        bucket.assign()
        assert bucket.n_bytes == 8
    assert seen == [torch.bfloat16] * 2
    assert whole.flat.dtype == torch.float32
    assert whole.flat.tolist() == [2.0] * 4
    assert own.grad.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(("n_rows", "dtype"), [(4, torch.float32), (3, torch.complex64)])
def test_gradients_on_their_way_by_nccl_are_kept_until_they_have_arrived(
    n_rows, dtype, monkeypatch
):
    # A bucket's end is marked on another stream, upon which NCCL's work forgets its tensors.
    def scatter(received, sent, **_):
        assert received.dtype == torch.float32
        received.copy_(2 * sent[0] if isinstance(sent, list) else 2 * sent.chunk(2)[0])

    for name in ("reduce_scatter_single", "reduce_scatter_tensor", "reduce_scatter"):
        monkeypatch.setattr(dist, name, scatter, raising=False)
    parameter = nn.Parameter(torch.zeros(n_rows, 2, dtype=dtype))
    bucket, own = scattered_over_two(parameter, "nccl")
    parameter.grad = torch.ones(n_rows, 2, dtype=dtype)
    bucket.collect()
    packed = weakref.ref(bucket.flat)
    bucket.pack()
    bucket.start(None)
    gc.collect()
    assert packed() is not None
    bucket.finish()
    assert packed() is None
    bucket.assign()
    assert own.grad.tolist() == [[2, 2]] * (n_rows // 2)


def test_an_addition_to_one_gradient_changes_no_other():
    flight = Flight(batch=None, samples=(0, 1), input_names=())
    one, other = PartKey("one", "one", 0), PartKey("other", "other", 0)
    for key in (one, other):
        flight.leaves[key] = torch.zeros(4, requires_grad=True)
    given = torch.arange(4.0).view(2, 2)
    (flight.leaves[one].view(2, 2) + flight.leaves[other].view(2, 2)).backward(given)
    assert flight.gradient(one).data_ptr() == flight.gradient(other).data_ptr() == given.data_ptr()

    flight.add_gradient(one, Region.of(((0, 4),), ((0, 4),)), torch.ones(4))

    assert flight.gradient(one).tolist() == [1, 2, 3, 4]
    assert flight.gradient(other).tolist() == given.flatten().tolist() == [0, 1, 2, 3]
    flight.own_gradient(other)
    assert flight.gradient(other).data_ptr() != given.data_ptr()

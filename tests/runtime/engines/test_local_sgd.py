"""Replicas that are averaged every few steps, against the formulas on whole vectors."""

import pytest
import torch
from averages_training import ReplicaSum
from torch import nn

from harness.errors import ModelError
from harness.runtime.engines.local_sgd import ReplicaAverage
from harness.runtime.engines.optimizers import OuterOptions

WEIGHTS = (0.5, 0.3, 0.2)


def make(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(5, 4), nn.Linear(1, 1))
    model[2].requires_grad_(False)
    return model.to(dtype).to(memory_format=torch.channels_last)


def train(models, options, n_steps, reduce_dtype="fp32"):
    """Move each replica by random steps of its own; returns the averages of all replicas."""
    averages = [None] * len(models)
    for k, model in enumerate(models):
        named = dict(model.named_parameters())
        averages[k] = ReplicaAverage(
            named, options, lambda *words: sums.all_reduce(*words), reduce_dtype
        )
    generator = torch.Generator().manual_seed(1)
    for _ in range(n_steps):
        sums = ReplicaSum()
        for average, weight in zip(averages, WEIGHTS, strict=True):
            average.begin(weight)
        for model in models:
            for parameter in trained(model):
                step = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.data.add_(step)
        for average in averages:
            average.wait()
            average.update()
    return averages


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def in_memory(tensor):
    """Elements in the order of memory; only a convolution's weight has another one."""
    order = (0, 2, 3, 1) if tensor.dim() == 4 else range(tensor.dim())
    return tensor.detach().permute(*order).reshape(-1)


def vector(model):
    return torch.cat([in_memory(parameter) for parameter in trained(model)])


def expected(models, options, n_steps):
    """The outer vector and those of the replicas, by the formulas."""
    outer = vector(models[0])
    local = [outer.clone() for _ in models]
    velocity, n_all = torch.zeros_like(outer), len(outer)
    generator = torch.Generator().manual_seed(1)
    for step in range(n_steps):
        k = step % options.sync_every
        part = slice(n_all * k // options.sync_every, n_all * (k + 1) // options.sync_every)
        start = [replica[part].clone() for replica in local]
        for replica in local:
            moves = [
                torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trained(models[0])
            ]
            replica += torch.cat([in_memory(move) for move in moves])
        change = sum(w * (outer[part] - s) for w, s in zip(WEIGHTS, start, strict=True))
        velocity[part] = options.momentum * velocity[part] + change
        outer[part] -= options.learning_rate * (change + options.momentum * velocity[part])
        for replica, before in zip(local, start, strict=True):
            replica[part] += outer[part] - before
    return outer, local


@pytest.mark.parametrize("sync_every", [1, 4, 200])
@pytest.mark.parametrize(("learning_rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_replicas_and_their_average_follow_the_formulas(sync_every, learning_rate, momentum):
    options = OuterOptions(sync_every=sync_every, learning_rate=learning_rate, momentum=momentum)
    models = [make() for _ in WEIGHTS]
    outer, local = expected(models, options, 11)
    averages = train(models, options, 11)
    for model, average, replica in zip(models, averages, local, strict=True):
        torch.testing.assert_close(vector(model), replica)
        whole = average.whole()
        found = torch.cat([in_memory(whole[parameter]) for parameter in trained(model)])
        torch.testing.assert_close(found, outer)


def test_a_restart_without_momentum_has_none():
    average, *_ = train([make() for _ in WEIGHTS], OuterOptions(sync_every=2, momentum=0.9), 3)
    assert average.momentum()
    average.restart({}, 0)
    assert average.momentum() == {}


def test_a_replica_alone_is_trained_as_without():
    alone, averaged = make(), make()
    generator = torch.Generator().manual_seed(1)
    named = dict(averaged.named_parameters())
    average = ReplicaAverage(named, OuterOptions(sync_every=3), ReplicaSum().all_reduce, "fp32")
    for _ in range(5):
        average._all_reduce = ReplicaSum().all_reduce
        average.begin(1.0)
        for one, other in zip(trained(alone), trained(averaged), strict=True):
            move = torch.randn(one.shape, generator=generator, dtype=one.dtype)
            one.data.add_(move)
            other.data.add_(move)
        average.wait()
        average.update()
    torch.testing.assert_close(vector(averaged), vector(alone))


def test_complex_and_narrow_parameters_keep_their_dtypes():
    values = {
        "complex": nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])),
        "narrow": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
    }
    average = ReplicaAverage(values, OuterOptions(sync_every=2), ReplicaSum().all_reduce, "bf16")
    for _ in range(2):
        average.begin(1.0)
        average.wait()
        average.update()
    found = average.whole()
    for parameter in values.values():
        assert torch.equal(found[parameter], parameter)
        assert found[parameter].dtype == parameter.dtype


def test_a_parameter_whose_elements_share_a_place_is_refused():
    named = {"scale": nn.Parameter(torch.ones(1).expand(4))}
    with pytest.raises(ModelError, match="the elements of scale in the order of its memory"):
        ReplicaAverage(named, OuterOptions(sync_every=2), ReplicaSum().all_reduce, "fp32")

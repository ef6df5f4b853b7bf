"""Gradients of a segment's inputs, which autograd lets share memory."""

import torch

from harness.runtime.executor.program.program import PartKey
from harness.runtime.executor.run.flight import Flight
from harness.runtime.executor.shards.regions import Relative


def test_an_addition_to_one_gradient_changes_no_other():
    flight = Flight(batch=None, samples=(0, 1), input_names=())
    one, other = PartKey("one", "one", 0), PartKey("other", "other", 0)
    for key in (one, other):
        flight.leaves[key] = torch.zeros(4, requires_grad=True)
    given = torch.arange(4.0).view(2, 2)
    (flight.leaves[one].view(2, 2) + flight.leaves[other].view(2, 2)).backward(given)
    assert flight.gradient(one).data_ptr() == flight.gradient(other).data_ptr() == given.data_ptr()

    flight.add_gradient(one, Relative.of(((0, 4),), ((0, 4),)), torch.ones(4))

    assert flight.gradient(one).tolist() == [1, 2, 3, 4]
    assert flight.gradient(other).tolist() == given.flatten().tolist() == [0, 1, 2, 3]
    flight.own_gradient(other)
    assert flight.gradient(other).data_ptr() != given.data_ptr()

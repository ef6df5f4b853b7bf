"""The accuracy of a model on digits that are held out."""

from types import SimpleNamespace

import pytest
import torch

from harness.runtime.data.images import DigitData
from harness.workloads.train.config import TrainCase
from harness.workloads.train.setup import make_task
from harness.workloads.train.workload import Evaluation, TrainLoop

CASE = TrainCase(model="lenet", data="digits", batch=4)


@pytest.fixture
def context():
    world = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    return SimpleNamespace(world=world)


def test_held_out_digits_are_the_others():
    trained, held_out = DigitData((1, 8, 8)), DigitData((1, 8, 8), is_held_out=True)
    assert (len(trained), len(held_out)) == (1440, 357)
    both = [d.__getitems__(list(range(len(d)))).inputs[0].flatten(1) for d in (trained, held_out)]
    assert len(torch.cat(both).unique(dim=0)) == 1797


def test_the_accuracy_is_the_share_of_held_out_digits_that_are_found(context):
    model = make_task(CASE).model
    with torch.no_grad():
        last = list(model.parameters())[-1]
        last += 100 * torch.nn.functional.one_hot(torch.tensor(3), 10)  # says 3 always
    labels = DigitData((1, 8, 8), is_held_out=True).__getitems__(list(range(357))).targets
    engine = SimpleNamespace(model_state=model.state_dict)
    assert Evaluation(CASE, context).accuracy(engine) == int((labels == 3).sum()) / 357


def test_the_epoch_in_which_a_run_goes_on_has_an_accuracy_but_no_time():
    found = []
    recorder = SimpleNamespace(sample=lambda metric, _, **labels: found.append((metric, labels)))
    plan = SimpleNamespace(n_steps_per_epoch=10, sizes=lambda step: [4])
    training = SimpleNamespace(plan=plan, engine=SimpleNamespace(n_synchronisations=0), n_steps=20)
    context = SimpleNamespace(world=SimpleNamespace(rank=0, interface="lo"), recorder=recorder)
    evaluation = SimpleNamespace(accuracy=lambda engine: 0.5)
    loop = TrainLoop(training, context, 1, evaluation=evaluation, first=5)
    for index in range(5, 20):
        loop._between(index)
    assert [(metric, labels["step"]) for metric, labels in found if "step" in labels] == [
        ("accuracy", 0), ("epoch_s", 1), ("accuracy", 1)
    ]  # fmt: skip

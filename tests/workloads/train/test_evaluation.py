"""The loop over steps, loss and accuracy on held-out samples, and losses that are refused."""

import copy
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from harness.errors import ConfigError, VerificationError
from harness.measure.recorder import HostClock, Recorder
from harness.plan.builders import single
from harness.runtime.capture.capture import capture
from harness.runtime.data.batch import MemoryData
from harness.runtime.data.images import open_digits
from harness.runtime.engines.engine import EngineOptions
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models.factory import task_of
from harness.runtime.models.task import IGNORED, ModelOptions
from harness.runtime.ranks.world import World
from harness.workloads.train import evaluation, workload
from harness.workloads.train.config import TrainCase
from harness.workloads.train.evaluation import Evaluation, has_equal_slices
from harness.workloads.train.setup import make_task, prepare
from harness.workloads.train.workload import TrainLoop

CASE = TrainCase(model="lenet", data="digits", batch=4)
PLAN = SimpleNamespace(n_steps_per_epoch=10, sizes=lambda step: [4])
TRAINING = SimpleNamespace(plan=PLAN, n_steps=20)


@pytest.fixture
def context():
    world = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), interface="lo")
    return SimpleNamespace(world=world)


def test_held_out_digits_are_the_others():
    trained, held_out = open_digits((1, 8, 8)), open_digits((1, 8, 8), is_held_out=True)
    assert (len(trained), len(held_out)) == (1440, 357)
    both = [d.__getitems__(list(range(len(d)))).inputs[0].flatten(1) for d in (trained, held_out)]
    assert len(torch.cat(both).unique(dim=0)) == 1797


def test_loss_and_accuracy_are_those_of_the_held_out_digits(context):
    task = make_task(CASE)
    model = task.model
    with torch.no_grad():
        last = list(model.parameters())[-1]
        last += 100 * torch.nn.functional.one_hot(torch.tensor(3), 10)  # says 3 always
    held_out = open_digits(task.inputs[0].shape, is_held_out=True)
    batch = held_out.__getitems__(list(range(357)))
    labels = batch.targets
    engine = SimpleNamespace(model_state=model.state_dict)
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    engine.averaged_state = lambda: state  # says 0 always
    logits = model.eval()(*batch.inputs).detach()
    loss = float(torch.nn.functional.cross_entropy(logits, labels))
    assert Evaluation(replace(CASE, ema=0.9), context, TRAINING).measure(engine) == {
        "validation_loss": pytest.approx(loss, rel=1e-5),
        "averaged_validation_loss": pytest.approx(math.log(10)),
        "accuracy": int((labels == 3).sum()) / 357,
        "averaged_accuracy": int((labels == 0).sum()) / 357,
    }
    assert [*Evaluation(CASE, context, TRAINING).measure(engine)] == ["validation_loss", "accuracy"]


@pytest.fixture
def alone():
    """The context of a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(world=World.of_program())
    dist.destroy_process_group()


def test_the_executor_evaluates_without_the_whole_model(alone, monkeypatch):
    case = replace(CASE, engine="executor")
    task, recorder = make_task(case), Recorder(HostClock())
    state = copy.deepcopy(task.model.state_dict())
    options = EngineOptions(dtype="fp32", optimizer=case.optimizer_options(), batch=4)
    plan = ExecutorPlan(strategy=single(capture(task, 4, "").graph, 4))
    engine = ExecutorEngine(task, alone.world, recorder, options, plan)
    whole = Evaluation(CASE, alone, TRAINING).measure(SimpleNamespace(model_state=lambda: state))
    engine.model_state = None
    made = []

    def make(case):
        task = make_task(case)
        made.append(weakref.ref(task.model))
        return task

    monkeypatch.setattr(evaluation, "make_task", make)
    own = Evaluation(case, alone, TRAINING)
    assert made[0]() is None
    found = own.measure(engine)
    assert found == {
        "validation_loss": pytest.approx(whole["validation_loss"]), "accuracy": whole["accuracy"]
    }  # fmt: skip
    assert recorder.collect() == []


def test_an_evaluation_after_the_last_step_is_refused(alone):
    case = replace(CASE, evaluate_every=21)
    with pytest.raises(ConfigError, match="is after 21 steps, and the run has 20: raise"):
        Evaluation(case, alone, TRAINING)


def test_averages_of_which_the_epochs_make_no_part_are_refused(alone):
    case = replace(CASE, batch=720, epochs=1, warm_up=2, sync_every=5, evaluate=True)
    with pytest.raises(ConfigError, match=r"--sync-every 5 makes a part .* the run has 4 steps"):
        prepare(case, alone.world, Recorder(HostClock()))


@pytest.mark.parametrize(
    ("changes", "layers", "wanted"),
    [
        ({}, [nn.Dropout(0.3)], True),
        ({}, [nn.BatchNorm1d(3)], True),
        ({"ema": 0.9}, [], False),
        ({"cache": "auto"}, [], False),
        ({"asynchronous": True, "strategy": "pipeline"}, [], False),
    ],
)
def test_slices_that_do_not_compute_what_the_whole_model_does_are_not_evaluated(
    changes, layers, wanted
):
    task = task_of("own", (nn.Sequential(nn.Linear(3, 3), *layers), torch.eye(3)), ModelOptions())
    assert has_equal_slices(replace(CASE, **changes), task) == wanted


class OwnLoss(nn.Module):
    """Computes its loss of two heads by a function."""

    def __init__(self, loss, n_logits):
        super().__init__()
        self.heads, self.loss = nn.ModuleList(nn.Linear(4, n_logits) for _ in range(2)), loss

    def forward(self, x, labels):
        logits, others = (head(x) for head in self.heads)
        return {"loss": self.loss(logits, others, labels), "logits": logits, "others": others}


def one_logit(logits, _, labels):
    return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels.float())


@pytest.mark.parametrize(
    ("loss", "n_logits", "has_classes"),
    [
        (lambda logits, _, labels: F.cross_entropy(logits, labels), 3, True),
        (one_logit, 1, False),
        (lambda logits, _, labels: F.nll_loss(logits.log_softmax(1), labels.view(-1)), 3, True),
        # A class that is numbered from another number, and levels.
        (lambda logits, _, labels: F.cross_entropy(logits, labels + 1), 3, False),
        (
            lambda a, _, y: F.binary_cross_entropy_with_logits(
                a, (y[:, None] > torch.arange(3)).float()
            ),
            3,
            False,
        ),
        # The largest of six joined logits is no class.
        (lambda a, b, labels: F.cross_entropy(a, labels) + F.cross_entropy(b, labels), 3, False),
    ],
)
def test_a_loss_of_a_models_own_has_an_accuracy_where_one_output_has_classes(
    loss, n_logits, has_classes
):
    example = {"x": torch.rand(3, 4), "labels": torch.tensor([0, 1, 1])}
    task = task_of("own", (OwnLoss(loss, n_logits), example), ModelOptions())
    assert task.loss == "own"
    assert task.has_classes == has_classes


def test_samples_without_a_class_do_not_count_for_the_accuracy(context, monkeypatch):
    rows, labels = torch.eye(3)[[0, 1, 2, 1]], torch.tensor([0, IGNORED, 2, 2])
    net = nn.Linear(3, 3, bias=False)
    net.weight.data = torch.eye(3)  # says the place of the 1
    task = task_of("own", (net, rows), ModelOptions())
    monkeypatch.setattr(evaluation, "make_task", lambda _: task)
    held_out = MemoryData([rows], labels)
    monkeypatch.setattr(evaluation, "open_held_out", lambda *_: held_out)
    engine = SimpleNamespace(model_state=task.model.state_dict)
    assert Evaluation(CASE, context, TRAINING).measure(engine)["accuracy"] == 2 / 3


class PaddedLoss(nn.Module):
    """The mean over the words that are no padding, of which unlike parts have unlike numbers."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(9, 9)

    def forward(self, words, labels):
        return {"loss": F.cross_entropy(self.rows(words), labels, ignore_index=0)}


def test_a_loss_of_the_whole_batch_is_that_of_the_same_parts_on_any_ranks(monkeypatch):
    words, net, summed = torch.arange(11) % 9, PaddedLoss(), []
    example = {"words": words[1:4], "labels": words[:3]}
    task = task_of("own", (net, example), ModelOptions())
    engine = SimpleNamespace(model_state=task.model.state_dict)
    monkeypatch.setattr(evaluation, "make_task", lambda _: task)
    monkeypatch.setattr(evaluation, "build_on_host", lambda make, _: make())
    held_out = MemoryData([words, words], words)
    monkeypatch.setattr(evaluation, "open_held_out", lambda *_: held_out)
    monkeypatch.setattr(evaluation, "gather_numbers", lambda own, _: summed.append(own) or [own])
    for rank in range(3):
        world = SimpleNamespace(rank=rank, size=3, device=torch.device("cpu"))
        Evaluation(CASE, SimpleNamespace(world=world), TRAINING).measure(engine)
    parts = [words[at : at + CASE.batch] for at in range(0, 11, CASE.batch)]
    losses = [len(part) * net(part, part)["loss"].item() for part in parts]
    assert summed[::3] == pytest.approx(losses)


@pytest.mark.parametrize(
    ("first", "every", "wanted"),
    [
        (5, None, [("accuracy", 9), ("epoch_s", 1), ("accuracy", 19)]),
        (20, None, [("accuracy", 19)]),
        (8, 4, [("accuracy", 7), ("accuracy", 11), ("accuracy", 15), ("epoch_s", 1),
                ("accuracy", 19)]),
    ],
)  # fmt: skip
def test_the_epoch_in_which_a_run_goes_on_has_an_accuracy_but_no_time(
    first, every, wanted, monkeypatch
):
    """That of an epoch which has ended may have been lost with a rank."""
    found = []
    recorder = SimpleNamespace(sample=lambda metric, _, **labels: found.append((metric, labels)))
    training = SimpleNamespace(**vars(TRAINING), engine=SimpleNamespace(n_synchronisations=0))
    context = SimpleNamespace(world=SimpleNamespace(rank=0, interface="lo"), recorder=recorder)
    measured = {"measure": lambda engine: {"accuracy": 0.5}}
    evaluation = SimpleNamespace(interval=lambda plan: every or 10, **measured)
    loop = TrainLoop(training, context, 1, evaluation=evaluation, first=first)
    monkeypatch.setattr(workload, "barrier", lambda: None)
    monkeypatch.setattr(workload, "measure_steps", lambda *_, **__: None)
    monkeypatch.setattr(loop, "_begin_epoch", lambda: None)
    loop.measure(20)
    for index in range(first, 20):
        loop._between(index)
    assert [(metric, labels["step"]) for metric, labels in found if "step" in labels] == wanted


def test_bytes_of_an_evaluation_or_a_change_are_not_those_of_a_step(monkeypatch):
    n_sent, found = [0], []

    def move(n_bytes, result):
        n_sent[0] += n_bytes
        return result

    recorder = SimpleNamespace(sample=lambda metric, value, **_: found.append((metric, value)))
    plan = SimpleNamespace(n_steps_per_epoch=2, sizes=lambda step: [4])
    training = SimpleNamespace(plan=plan, engine=SimpleNamespace(n_synchronisations=0), n_steps=6)
    context = SimpleNamespace(world=SimpleNamespace(rank=0, interface="lo"), recorder=recorder)
    evaluation = SimpleNamespace(interval=lambda _: 2, measure=lambda engine: move(500, {}))
    changed = SimpleNamespace(**vars(training))
    changes = SimpleNamespace(
        before_step=lambda step, now: move(7000, changed) if step == 3 else now
    )
    monkeypatch.setattr(workload.NicCounter, "_read", lambda _: (n_sent[0], 0))
    loop = TrainLoop(training, context, 1, changes, evaluation)
    for index in range(6):
        move(10, None)
        loop._between(index)
    assert [value for metric, value in found if metric == "nic_sent_bytes"] == 6 * [10]


def test_a_run_that_goes_on_repeats_an_evaluation_before_layers_freeze_and_lose_their_averages(
    monkeypatch,
):
    done = []
    changes = SimpleNamespace(before_step=lambda step, now: done.append("change"))
    loop = TrainLoop(TRAINING, SimpleNamespace(world=SimpleNamespace(interface="lo")), 1, changes,
                     first=10)  # fmt: skip
    monkeypatch.setattr(workload, "barrier", lambda: None)
    monkeypatch.setattr(workload, "measure_steps", lambda *_, **__: None)
    monkeypatch.setattr(loop, "_evaluate", lambda step: done.append(step))
    loop.measure(20)
    assert done == [9, "change"]


def test_ranks_wait_for_each_other_between_warm_up_and_the_first_recorded_step(monkeypatch):
    done = []
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[]),
        step=lambda fetch, share: done.append("step") or torch.tensor(1.0),
    )
    training = SimpleNamespace(
        engine=engine, rates=SimpleNamespace(at=float), n_steps=2, share=lambda step, rank: None
    )
    world = SimpleNamespace(rank=0, size=1, interface="lo")
    loop = TrainLoop(training, SimpleNamespace(world=world), 2)
    monkeypatch.setattr(workload, "barrier", lambda: done.append("barrier"))
    for index in range(-2, 2):
        loop._step(index)
    assert done == ["step", "step", "barrier", "step", "step"]


def test_a_run_that_goes_on_after_its_last_step_has_no_losses_but_finite_weights(context):
    model = torch.nn.Linear(2, 2)
    training = SimpleNamespace(n_steps=9, executor=SimpleNamespace(model=model))
    loop = TrainLoop(training, context, 1, first=9)
    assert loop.record_losses() == []
    torch.nn.init.constant_(model.bias, float("inf"))
    with pytest.raises(VerificationError, match="the weights after step 9 are inf: lower"):
        loop.record_losses()

"""A task from example inputs: shapes, ranges and targets; a model of transformers has its own."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from launching import ROOT
from nets import held
from torch import nn
from zoo import ZOO

from harness.errors import DataError, ModelError
from harness.runtime.capture.capture import capture
from harness.runtime.capture.meta_run import step_flops
from harness.runtime.data.own import OwnData
from harness.runtime.data.synthetic import SyntheticData, draw_batch
from harness.runtime.faithfulness.loss import hold_own_loss
from harness.runtime.models import loss_parts
from harness.runtime.models.factory import task_of, weights_on_meta
from harness.runtime.models.own_loss import BatchLossTask, LabelledTask, join
from harness.runtime.models.task import InputSpec, ModelOptions, Task, TextOptions
from harness.runtime.models.torchvision_import import allow_torchvision

OPTIONS = ModelOptions(n_classes=7, n_channels=3, image_size=32)
TOKENS = torch.tensor([[4, 1, 2], [0, 3, 1]])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(5, 6), nn.Linear(6, 9)


class Tagger(Words):
    """Reads tokens and, nested in a dict, a table; gives classes for each token."""

    def forward(self, skipped=None, *, tokens, more):
        assert skipped is None
        positions = torch.arange(tokens.shape[1])
        mask = (positions[:, None] >= positions).float()
        return {"loss": None, "out": self.last(mask @ self.words(tokens) + more["table"])}


def test_inputs_and_targets_are_read_off_an_example():
    table = torch.rand(2, 3, 6)
    task = task_of("m:f", (Tagger(), {"tokens": TOKENS, "more": {"table": table}}), OPTIONS)
    assert task.inputs == (
        InputSpec(name="tokens", shape=(3,), dtype=torch.int64, n_values=5, n_rows=5),
        InputSpec(name="more_table", shape=(3, 6), is_fraction=True),
    )
    assert (task.n_classes, task.target_shape, task.loss) == (9, (3,), "cross_entropy")
    assert task.prefix == "model."
    # The mask is a constant, so no operator makes it.
    functions = [op.attrs["function"] for op in held(task).graph.operators if op.kind != "input"]
    assert functions == ["Embedding", "matmul", "add", "Linear", "cross_entropy"]


def test_integers_of_a_synthetic_sample_are_those_of_one_of_the_examples():
    examples = {"tokens": TOKENS, "more": {"table": TOKENS[:, :, None].repeat(1, 1, 6)}}
    task = task_of("m:f", (Tagger(), examples), OPTIONS)
    data = SyntheticData(task, 9, seed=3)
    batches = draw_batch(task, 5, 1, torch.device("cpu")), data.__getitems__([4, 7])
    for tokens, table in (batch.inputs for batch in batches):
        assert {tuple(row) for row in tokens.tolist()} == {(4, 1, 2), (0, 3, 1)}
        assert torch.equal(tokens, table[:, :, 5])
    labels = torch.tensor([[1, -100, 4], [2, 0, 3]])  # not all of which count
    examples["more"] = {"table": labels[..., None]}
    task = task_of("m:f", (Tagger(), examples), OPTIONS)
    assert task.inputs[1].rows is None


class Checking(Tagger):
    def forward(self, tokens, more):
        torch._check_tensor_all(tokens.sum() > 0)
        return super().forward(tokens=tokens, more=more)


def test_checks_of_values_are_left_out_where_weights_have_none():
    with weights_on_meta():
        task = task_of("m:f", (Checking(), {"tokens": TOKENS, "more": {"table": 1.0}}), OPTIONS)
    assert task.n_classes == 9
    assert step_flops(task, 3) is not None


class Compiled(Tagger):
    """Its kernel would read the memory of its inputs."""

    def __init__(self):
        super().__init__()
        self.as_they_are = torch.compile(lambda tokens: tokens + 0, backend=self.fail)

    def fail(self, *_):
        raise AssertionError

    def forward(self, tokens, more):
        return super().forward(tokens=self.as_they_are(tokens), more=more)


def test_compiled_code_runs_as_it_is_written_where_tensors_have_no_memory():
    task = task_of("m:f", (Compiled(), {"tokens": TOKENS, "more": {"table": 1.0}}), OPTIONS)
    assert step_flops(task, 3) is not None


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "its example holds nothing: give tensors"),
        ({"tokens": 3}, "its example holds int: give tensors"),
        ({"tokens": TOKENS[:0]}, "its example holds a Tensor of shape (0, 3): give tensors"),
        (
            {"tokens": TOKENS, "edges": TOKENS.T},
            "its example has 2 samples of tokens and 3 of edges, and the first dim",
        ),
        ({"tokens": TOKENS}, "its forward fails on inputs of 2x3 (TypeError"),
        (
            {"tokens": TOKENS[0]},
            ": call the model with the example where it is made, and mend what",
        ),
    ],
)
def test_a_wrong_example_is_refused_in_one_line(example, message):
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        task_of("m:f", (Annotator(), example), OPTIONS)
    assert "\n" not in str(caught.value)


class OfTwo(nn.Linear):
    def forward(self, x):
        found = super().forward(x)
        return {"found": found, "loss": found.view(2, 6).mean()}


def test_a_loss_that_takes_the_examples_number_of_samples_alone_is_refused():
    with pytest.raises(ModelError, match=r"17x4 .*: the model takes the example, which has fewer"):
        task_of("m:f", (OfTwo(4, 6), torch.rand(2, 4)), OPTIONS)


def documented(page, file):
    """The names that a page's Python block of a file defines."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"# {file}")]
    allow_torchvision()
    names: dict = {}
    exec(block, names)
    return names


@pytest.mark.parametrize(
    ("file", "factory", "shapes", "target_shape", "n_classes"),
    [
        ("hub.py", "bert", [(16,)], (), 2),
        ("hub.py", "gpt", [(16,)], (16,), 50257),
        ("hub.py", "convnext", [(3, 32, 32)], (), 1000),
        ("pairs.py", "pairs", [(3,), (100,)], (), 5),
        ("digits.py", "net", [(64,)], (), 10),
    ],
)
def test_documented_factories_are_captured(file, factory, shapes, target_shape, n_classes):
    options = replace(OPTIONS, n_classes=1000, text=TextOptions(sequence_length=16))
    task = task_of("m:f", documented("docs/models.md", file)[factory](), options)
    assert isinstance(task, Task)
    assert [spec.shape for spec in task.inputs] == shapes
    assert (task.target_shape, task.n_classes) == (target_shape, n_classes)
    assert not [op.name for op in held(task).graph.operators if op.attrs.get("mixes_samples")]


def test_documented_data_are_batches_of_the_documented_model():
    names = documented("docs/models.md", "digits.py")
    task = task_of("m:f", names["net"](), OPTIONS)
    trained, held_out = (OwnData("m:f", samples, task) for samples in names["images"](seed=0))
    assert (len(trained), len(held_out)) == (1500, 297)
    assert [x.shape for x in trained.__getitems__([7, 3]).inputs] == [(2, 64)]


# Losses of a layer, its inputs, its outputs, soft targets and labels.
LOSSES = {
    "weighted": lambda last, x, y, soft, labels: (
        3 * F.mse_loss(y.sum(1), labels) + y.square().mean()
    ),
    "contrast": lambda last, x, y, soft, labels: (y.sum(1) - labels).square().mean().sqrt(),
    "distilled": lambda last, x, y, soft, labels: (
        F.cross_entropy(y, labels) + F.kl_div(y.log_softmax(1), soft, reduction="batchmean")
    ),
    "masked": lambda last, x, y, soft, labels: (y.square() * labels).sum() / labels.sum(),
    "classes": lambda last, x, y, soft, labels: F.cross_entropy(
        y, labels, weight=torch.arange(1.0, 7.0)
    ),
    "hidden": lambda last, x, y, soft, labels: F.mse_loss(last(x).sum(1), labels),
    "smooth": lambda last, x, y, soft, labels: F.cross_entropy(y, labels, label_smoothing=0.1),
    "probable": lambda last, x, y, soft, labels: F.cross_entropy(y, labels),
    "one-hot": lambda last, x, y, soft, labels: F.cross_entropy(y, F.one_hot(labels, 6).float()),
    "levels": lambda last, x, y, soft, labels: F.mse_loss(y, labels) + F.l1_loss(y, labels) / 2,
    "beside": lambda last, x, y, soft, labels: F.cross_entropy(y, labels) + y.square().mean(),
    "padded": lambda last, x, y, soft, labels: (
        (F.cross_entropy(y, labels, reduction="none") * (labels != 1)).sum() / (labels != 1).sum()
    ),
    "blank": lambda last, x, y, soft, labels: F.nll_loss(y.log_softmax(1), labels, ignore_index=0),
    "missing": lambda last, x, y, soft, labels: (
        torch.where(labels.isnan(), 0.0, y - labels).square().sum() / (~labels.isnan()).sum()
    ),
    "void": lambda last, x, y, soft, labels: (
        F.cross_entropy(y, labels, ignore_index=255) + y.square().mean()
    ),
    "flooded": lambda last, x, y, soft, labels: (
        (F.cross_entropy(y, labels) - 0.1).abs() + 0.1 + y.square().mean()
    ),
    "counted": lambda last, x, y, soft, labels: F.mse_loss(y.sum(1), labels) * (len(y) + 1),
    "scaled": lambda last, x, y, soft, labels: F.mse_loss(y.sum(1), labels) * math.log(1 + len(y)),
    "triplet": lambda last, x, y, soft, labels: F.triplet_margin_loss(
        y, y.roll(1, 0), y.roll(2, 0)
    ),
    "branch": lambda last, x, y, soft, labels: (
        F.mse_loss(y.sum(1), labels) if len(y) < 16 else F.l1_loss(y.sum(1), labels)
    ),
    "threshold": lambda last, x, y, soft, labels: (
        F.mse_loss(y.sum(1), labels) * (2 if len(y) > 3 else 1)
    ),
    "squared": lambda last, x, y, soft, labels: F.cross_entropy(y, labels).square(),
}


class Scorer(nn.Module):
    """Computes a loss from labels."""

    def __init__(self, form):
        super().__init__()
        self.loss, self.last = LOSSES[form], nn.Linear(4, 6)

    def forward(self, x, labels=None):
        hidden, soft, loss = x.tanh(), x.repeat(1, 2)[:, :6].softmax(1), None
        logits = self.last(hidden)
        if labels is not None:
            loss = self.loss(self.last, hidden, logits, soft, labels)
        return {"loss": loss, "logits": logits, "soft": soft}


class Heads(nn.Module):
    """Two losses, of labels of two dtypes, that are always computed."""

    def __init__(self):
        super().__init__()
        self.classes, self.level = nn.Linear(4, 6), nn.Linear(4, 1)

    def forward(self, x, labels, levels):
        logits, level = self.classes(x), self.level(x).squeeze(1)
        loss = F.cross_entropy(logits, labels) + F.mse_loss(level, levels)
        return {"loss": loss, "logits": logits, "level": level}


class Shifted(nn.Linear):
    """Its classes are numbered from 1."""

    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, labels - 1), "logits": logits}


def test_a_loss_that_is_always_computed_gets_a_label_of_the_example():
    example = {"x": torch.rand(2, 4), "labels": torch.tensor([1, 6])}
    task = task_of("m:f", (Shifted(4, 6), example), OPTIONS)
    assert task.model(example["x"])["logits"].shape == (2, 6)  # a label of 0 would be no class
    held(task)


def test_a_cross_entropy_beside_another_loss_is_a_mean_over_samples():
    x, labels, levels = torch.rand(2, 4), torch.tensor([2, 5]), torch.tensor([0.5, -1.0])
    task = task_of("m:f", (Heads(), {"x": x, "labels": labels, "levels": levels}), OPTIONS)
    assert [spec.name for spec in task.inputs] == ["x"]
    targets = task.own_loss.join_labels([labels, levels])
    assert targets.dtype == task.target_dtype == task.draw_targets(3).dtype
    assert_mean(task, x, targets, task.model.model(x, labels, levels)["loss"], 2)
    held(task)


def assert_mean(task, x, targets, loss, n_counted):
    """Compare a task's sum over samples, one by one, with the mean that a model computes."""
    parts = [task.sum_loss(task.model(x[k : k + 1]), targets[k : k + 1]) for k in range(len(x))]
    torch.testing.assert_close(sum(parts) / n_counted, loss, rtol=1e-5, atol=0)


class Annotator(nn.Module):
    """A class of each sample, and one of each token, of which some do not count."""

    def __init__(self):
        super().__init__()
        self.classes, self.tags = nn.Linear(4, 6), nn.Linear(4, 3 * 5)

    def forward(self, x, labels, tags):
        logits, found = self.classes(x), self.tags(x).view(-1, 3, 5)
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(found.flatten(0, 1), tags.view(-1))
        return {"loss": loss, "logits": logits, "found": found}


TAGS = torch.tensor([[0, 3, 4], [-100, 2, -100]])


def tagged(tags):
    example = {"x": torch.rand(2, 4), "labels": torch.tensor([2, 5]), "tags": tags}
    return task_of("m:f", (Annotator(), example), OPTIONS)


def test_tokens_that_do_not_count_in_one_of_two_losses_keep_the_loss_on_whole_batches():
    x, labels = torch.rand(2, 4), torch.tensor([2, 5])
    task = tagged(TAGS)
    assert_whole(task, task.model.model.model(x, labels, TAGS)["loss"], x, labels, TAGS)


def assert_whole(task, loss, *inputs):
    """The loss of a task is computed on whole batches, as its model does."""
    assert isinstance(task, BatchLossTask)
    n_samples = len(inputs[0])
    found = task.sum_loss(task.model(*inputs), task.draw_targets(n_samples)) / n_samples
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)


def test_a_model_that_returns_its_loss_alone_is_a_task():
    class Alone(nn.Linear):
        def forward(self, x, labels):
            return F.cross_entropy(super().forward(x), labels)

    x, labels = torch.rand(3, 4), torch.tensor([1, 5, 0])
    model = Alone(4, 6)
    task = task_of("m:f", (model, {"x": x, "labels": labels}), OPTIONS)
    assert_whole(task, model(x, labels), x, labels)
    assert task.reason == "its forward returns the loss alone"


def test_tokens_that_do_not_count_in_one_of_two_losses_are_in_the_example():
    task = tagged(TAGS.abs() % 5)
    assert isinstance(task, LabelledTask)
    samples = [{"x": torch.rand(4), "labels": 1, "tags": tags} for tags in TAGS]
    with pytest.raises(DataError, match=r"sample 1 .* tags of -100, and the example .* has none"):
        OwnData("--data 'm:d'", samples, task).__getitems__([1])


def test_a_class_that_does_not_count_and_is_not_in_the_example_is_refused():
    task = scored("void", torch.tensor([2, 5]))
    assert isinstance(task, LabelledTask)
    data = OwnData("--data 'm:d'", [{"x": torch.rand(4), "labels": 255}], task)
    with pytest.raises(DataError, match="labels of 255, and the example of the model has none"):
        data.__getitems__([0])


class Pixels(nn.Module):
    """Reads images; `form` says which output is returned."""

    def __init__(self, form="pixels"):
        super().__init__()
        self.form, self.conv, self.last = form, nn.Conv2d(3, 32, 1), nn.Linear(32, 1)

    def forward(self, x):
        y = self.conv(x)
        again = y[:, :3]
        found = {
            "loss": {"loss": F.mse_loss(again, x), "found": again},
            "one": self.last(y.mean((2, 3))),
            "mask": y[:, :1],
            "scalar": y.mean().detach(),
            "complex": torch.fft.fft(y),
        }
        if self.form == "value" and y.max() > 1e9:
            y = y / 2
        return found.get(self.form, y)


@pytest.mark.parametrize(
    ("form", "loss", "n_classes", "target_shape"),
    [
        ("pixels", "cross_entropy", 32, (32, 32)),
        ("value", "cross_entropy", 32, (32, 32)),
        ("loss", "own", 0, (3, 32, 32)),
        ("one", "binary_cross_entropy", 0, ()),
        ("mask", "binary_cross_entropy", 0, (32, 32)),
    ],
)
def test_the_outputs_of_a_plain_module_say_its_loss(form, loss, n_classes, target_shape):
    task = task_of("m:f", Pixels(form), OPTIONS)
    assert [spec.shape for spec in task.inputs] == [(3, 32, 32)]
    assert (task.loss, task.n_classes, task.target_shape) == (loss, n_classes, target_shape)
    outputs, targets = task.model(task.inputs[0].draw(2)), task.draw_targets(2)
    if form == "pixels":  # as many classes as rows and columns
        found = task.sum_loss(outputs, targets)
        assert torch.allclose(found, F.cross_entropy(outputs, targets, reduction="sum"))


@pytest.mark.parametrize(
    ("form", "message"),
    [("scalar", "torch.float32 of shape ()"), ("complex", "torch.complex64 of shape (2, 32")],
)
def test_outputs_without_a_loss_are_refused_in_one_line(form, message):
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        task_of("m:f", Pixels(form), OPTIONS)
    assert "\n" not in str(caught.value)


def scored(form, labels):
    torch.manual_seed(0)
    return task_of("m:f", (Scorer(form), {"x": torch.rand(2, 4), "labels": labels}), OPTIONS)


@pytest.mark.parametrize(
    ("form", "labels"),
    [
        ("weighted", torch.tensor([0.5, -1.0])),
        ("smooth", torch.tensor([2, 5])),
        ("distilled", torch.tensor([2, 5])),
        ("probable", torch.tensor([[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.2, 0.2, 0, 0.6]])),
        ("one-hot", torch.tensor([2, 5])),
    ],
)
def test_the_models_own_loss_is_trained(form, labels):
    task, x = scored(form, labels), torch.rand(2, 4)
    assert [spec.name for spec in task.inputs] == ["x"]
    assert task.draw_targets(3).dtype == labels.dtype
    assert_mean(task, x, labels, task.model.model(x, labels)["loss"], task.count_targets(labels))


def test_targets_that_do_not_count_are_left_out_of_the_mean():
    x, labels = torch.rand(3, 4), torch.tensor([-100, 5, 1])
    task = scored("smooth", torch.tensor([2, 5]))
    own = task.own_loss
    assert [own.count(labels[:1]), own.count(labels), task.n_targets] == [0, 2, 1]
    assert_mean(task, x, labels, task.model.model(x, labels)["loss"], 2)


IN_PLACE = {
    "and": lambda mask, labels: mask.__iand__(labels != 2),
    "view": lambda mask, labels: mask.view(-1).logical_and_(labels != 2),
    "item of a view": lambda mask, labels: mask.view(-1).__setitem__(labels == 2, False),
    "data": lambda mask, labels: mask.data.logical_and_(labels != 2),
    "out": lambda mask, labels: torch.logical_and(mask, labels != 2, out=mask),
    "detached": lambda mask, labels: mask.copy_(masked_without_gradients(labels)),
}


@torch.inference_mode()
def masked_without_gradients(labels):
    mask = labels != 1
    return mask.logical_and_(labels != 2)


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_what_a_loss_changes_in_place_is_changed_in_the_trained_one(change):
    class Masked(nn.Linear):
        def forward(self, x, labels):
            logits, mask = super().forward(x), labels != 1
            change(mask, labels)
            loss = F.cross_entropy(logits, labels, reduction="none") * mask
            return {"loss": loss.mean(), "logits": logits}

    x, labels = torch.rand(3, 4), torch.tensor([1, 2, 3])
    task = task_of("m:f", (Masked(4, 6), {"x": x, "labels": labels}), OPTIONS)
    assert isinstance(task, LabelledTask)
    assert_mean(task, x, labels, task.model.model(x, labels)["loss"], 3)


PADS = {
    "label": lambda labels: labels.masked_fill_(labels == 1, -100),
    "view": lambda labels: labels.view(-1).__setitem__(labels == 1, -100),
    "copy": lambda labels: labels.clone().masked_fill_(labels == 1, -100),
    "less": lambda labels: labels.sub_(1),
}


@pytest.mark.parametrize("change", PADS.values(), ids=PADS)
def test_labels_that_a_loss_changes_in_place_count_as_changed_and_stay_as_they_are(change):
    class Padded(nn.Linear):
        def forward(self, x, labels):
            logits, changed = super().forward(x), change(labels)
            loss = F.cross_entropy(logits, labels if changed is None else changed)
            return {"loss": loss, "logits": logits}

    x, labels = torch.rand(3, 4), torch.tensor([1, 2, 3])
    task = task_of("m:f", (Padded(4, 6), {"x": x, "labels": labels.clone()}), OPTIONS)
    n_counted = task.count_targets(labels)
    assert n_counted == (3 if change is PADS["less"] else 2)
    assert_mean(task, x, labels, task.model.model(x, labels.clone())["loss"], n_counted)
    assert labels.tolist() == [1, 2, 3]


def test_outputs_that_are_changed_after_the_loss_keep_it_in_the_model():
    class Doubled(nn.Linear):
        def forward(self, x, labels):
            logits = super().forward(x)
            loss = (logits.sum(1) - labels).square().mean()
            return {"loss": loss, "logits": logits.mul_(2)}

    x, labels = torch.rand(3, 4), torch.tensor([0.5, 1.0, 2.0])
    task = task_of("m:f", (Doubled(4, 6), {"x": x, "labels": labels}), OPTIONS)
    assert task.reason == "it changes in place what its loss reads"
    assert_whole(task, task.model.model.model(x, labels)["loss"], x, labels)


def test_a_tensor_that_is_returned_twice_or_is_an_input_is_read_once():
    class Repeating(nn.Linear):
        def forward(self, x, labels):
            logits = super().forward(x)
            loss = F.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits, "scores": logits, "labels": labels}

    x, labels = torch.rand(3, 4), torch.tensor([1, 2, 3])
    task = task_of("m:f", (Repeating(4, 6), {"x": x, "labels": labels}), OPTIONS)
    assert list(task.own_loss.outputs) == ["logits"]
    assert_mean(task, x, labels, task.model.model(x, labels)["loss"], 3)
    assert task.count_targets(labels) == 3


READS = {
    "item of the loss": lambda loss, labels: 2 * loss if loss.item() < 100 else loss,
    "truth of labels": lambda loss, labels: 2 * loss if (labels == 3).any() else loss,
    "number of labels": lambda loss, labels: loss * labels.unique().numel(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_loss_that_reads_values_as_numbers_stays_in_the_model(read):
    class Reading(nn.Linear):
        def forward(self, x, labels=None):
            logits, loss = super().forward(x), None
            if labels is not None:
                loss = read(F.cross_entropy(logits, labels), labels)
            return {"loss": loss, "logits": logits}

    x, labels = torch.rand(3, 4), torch.tensor([1, 2, 3])
    task = task_of("m:f", (Reading(4, 6), {"x": x, "labels": labels}), OPTIONS)
    assert_whole(task, task.model.model.model(x, labels)["loss"], x, labels)


def test_a_loss_that_is_checked_to_be_finite_is_split_off():
    class Checked(nn.Linear):
        def forward(self, x, labels=None):
            logits, loss = super().forward(x), None
            if labels is not None:
                loss = F.cross_entropy(logits, labels)
                if torch.isnan(loss).any():
                    raise ValueError("loss is NaN")
            return {"loss": loss, "logits": logits}

    x, labels = torch.rand(3, 4), torch.tensor([1, 2, 3])
    task = task_of("m:f", (Checked(4, 6), {"x": x, "labels": labels}), OPTIONS)
    assert_mean(task, x, labels, task.model.model(x, labels)["loss"], 3)


def clamped(model, labels):
    labels.data = labels.clamp(max=1)


def clamped_by_numpy(model, labels):
    labels.numpy().clip(max=1, out=labels.numpy())


def counted(model, labels):
    model.count += len(labels)


def forgotten(model, labels):
    model.n_calls += 1
    labels.add_(model.n_calls).sub_(1)


UNSEEN = {
    "data": (clamped, "from its outputs and labels: compute the loss without numpy"),
    "numpy": (clamped_by_numpy, "from its outputs and labels: compute the loss without numpy"),
    "count": (forgotten, "from its outputs and labels: compute the loss without numpy"),
    "buffer": (counted, "writes the buffer 'count' where it gets labels"),
}


@pytest.mark.parametrize(("change", "message"), UNSEEN.values(), ids=UNSEEN)
def test_what_calls_of_torch_do_not_show_of_a_loss_is_refused(change, message):
    class Unseen(nn.Linear):
        def __init__(self):
            super().__init__(4, 6)
            self.register_buffer("count", torch.tensor(0))
            self.n_calls = 0

        def forward(self, x, labels=None):
            logits, loss = super().forward(x), None
            if labels is not None:
                changed = labels.clone()
                change(self, changed)
                loss = F.cross_entropy(logits, changed)
            return {"loss": loss, "logits": logits}

    model, labels = Unseen(), torch.tensor([1, 2, 3])
    task = task_of("m:f", (model, {"x": torch.rand(3, 4), "labels": labels}), OPTIONS)
    with pytest.raises(ModelError, match=message):
        held(task)
    assert model.count == model.n_calls == 0


def test_a_loss_that_is_another_each_time_is_not_compared():
    class Noisy(nn.Linear):
        generator = torch.Generator().manual_seed(1)

        def forward(self, x, labels=None):
            logits = super().forward(x + torch.rand(x.shape, generator=self.generator))
            return {
                "loss": None if labels is None else F.cross_entropy(logits, labels),
                "logits": logits,
            }

    labels = torch.tensor([1, 2, 3])
    task = task_of("m:f", (Noisy(4, 6), {"x": torch.rand(3, 4), "labels": labels}), OPTIONS)
    assert isinstance(task, LabelledTask)
    hold_own_loss(task, "noisy")


@pytest.mark.parametrize("form", ["contrast", "hidden"])
def test_a_loss_that_compares_samples_or_reads_more_than_outputs_stays_in_the_model(form):
    x, labels = torch.rand(2, 4), torch.tensor([0.5, -1.0])
    task = scored(form, labels)
    assert task.prefix == "model.model."
    assert_whole(task, task.model.model.model(x, labels)["loss"], x, labels)
    assert (held(task).graph.mixing_operator() is None) == (form == "hidden")


class Tied(nn.Module):
    """Functions among its attributes read its modules, as in minGPT and x-transformers."""

    def __init__(self):
        super().__init__()
        layers = nn.ModuleDict({"words": nn.Embedding(5, 6), "mlp": nn.Linear(6, 6)})
        self.layers, self.mlp = layers, lambda x: layers.mlp(x).relu()
        self.last = lambda x, scale=2.0: scale * x @ self.layers.words.weight.T

    def forward(self, tokens):
        return self.last(self.mlp(self.layers.words(tokens)))


def test_functions_among_attributes_read_the_modules_of_their_own_model():
    torch.manual_seed(0)
    model = Tied()
    task = task_of("m:f", (model, (TOKENS,)), OPTIONS)
    held(task)
    copied = copy.deepcopy(task.model)
    copied(TOKENS).sum().backward()
    assert copied.layers.mlp.weight.grad is not None
    assert model.layers.mlp.weight.grad is None


class Autoencoder(nn.Linear):
    """Its loss takes pixels between 0 and 1 alone."""

    def forward(self, x):
        y = super().forward(x).sigmoid()
        return y, F.binary_cross_entropy(y, x)


def test_real_values_are_between_0_and_1_where_those_of_the_example_are():
    task = task_of("m:f", (Autoencoder(6, 6), torch.rand(2, 6)), OPTIONS)
    assert isinstance(task, LabelledTask)
    held(task)
    task = task_of("m:f", (nn.Linear(6, 6), torch.zeros(2, 6)), OPTIONS)
    assert not task.inputs[0].is_fraction


@pytest.mark.parametrize(
    ("form", "labels"),
    [
        ("masked", torch.ones(2, 6, dtype=torch.int64)),
        ("masked", torch.ones(2, 6, dtype=torch.bool)),
        ("classes", torch.zeros(2, dtype=torch.int64)),
        ("padded", torch.tensor([2, 5])),
        ("blank", torch.tensor([2, 5])),
        ("missing", torch.rand(2, 6)),
        ("flooded", torch.tensor([2, 5])),
        ("void", torch.tensor([2, 255])),
        ("counted", torch.rand(2)),
        ("scaled", torch.rand(2)),
        ("branch", torch.rand(2)),
        ("threshold", torch.rand(2)),
        ("triplet", torch.rand(2)),
    ],
)
def test_labels_that_are_alike_in_the_example_hide_no_mean_over_the_batch(form, labels):
    assert isinstance(scored(form, labels), BatchLossTask)


def test_one_tensor_may_be_tokens_and_labels():
    class Reading(Words):
        def forward(self, tokens, labels):
            assert tokens.sum() > 0
            logits = self.last(self.words(tokens))
            return {"logits": logits, "loss": F.cross_entropy(logits.mT, labels)}

    tokens = torch.tensor([[1, 4], [2, 3]])
    task = task_of("m:f", (Reading(), {"tokens": tokens, "labels": tokens}), OPTIONS)
    assert [spec.name for spec in task.inputs] == ["tokens"]
    assert [spec.name for spec in task.labels] == ["labels"]


class Generator(Words):
    """As in nanoGPT: a tuple with the loss, and without targets only the last token's logits."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, tokens, targets=None):
        x, loss = self.words(tokens), None
        if targets is None:
            x = x[:, [-1], :] if self.form == "last" else 2 * x
        logits = self.last(x)
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, 9), targets.view(-1), ignore_index=-1)
        return (loss, logits) if self.form == "loss first" else (logits, loss)


@pytest.mark.parametrize("form", ["last", "double", "loss first"])
def test_the_loss_of_a_tuple_is_trained_on_what_the_model_computes_with_labels(form):
    torch.manual_seed(0)
    targets = torch.tensor([[8, 0, -1], [2, 2, 7]])
    task = task_of("m:f", (Generator(form), {"tokens": TOKENS, "targets": targets}), OPTIONS)
    assert [spec.name for spec in task.inputs] == ["tokens"]
    assert (task.target_shape, task.count_targets(targets)) == ((3,), 5)
    outputs = Generator.forward(task.model.model, TOKENS, targets)
    wanted = next(x for x in outputs if not x.dim())
    found = task.sum_loss(task.model(TOKENS), targets) / 5
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    held(task)


class Summed(nn.Module):
    """Checks its labels, as the CTC models of transformers do, and adds up a loss."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 6)

    def forward(self, x, labels):
        if labels.max() > 5:
            raise ValueError("there are 6 classes")
        logits = self.last(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels, reduction="sum")}


def test_a_refusal_says_why_the_model_keeps_its_loss():
    task = task_of(
        "m:f", (Summed(), {"x": torch.rand(2, 4), "labels": torch.tensor([0, 5])}), OPTIONS
    )
    with pytest.raises(ModelError, match=r"by the values .* keeps its loss, because .* adds up to"):
        capture(task, 2, "summed")


class Cached(Words):
    """Reads a table that a cached function makes of its inputs' device."""

    tables: ClassVar = {}

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, tokens, *, is_scaled):
        x = self.words(tokens)
        return self.last(x * self.table(x.device)) if is_scaled else x, None


_TABLES = {}


def _table(device):
    return torch.arange(6.0, device=device)


def _table_of_module(device):
    if device not in _TABLES:
        _TABLES[device] = torch.arange(6.0, device=device)
    return _TABLES[device]


def _table_of_class(device):
    if device not in Cached.tables:
        Cached.tables[device] = (torch.arange(6.0, device=device), None)
    return Cached.tables[device][0]


class Scheduler:
    """An object that keeps its table, moved to the inputs' device, as those of diffusers do."""

    def __init__(self):
        self.held = torch.arange(6.0)

    def __call__(self, device):
        self.held = self.held.to(device)
        return self.held


@pytest.mark.parametrize("table", [_table, _table_of_module, _table_of_class, Scheduler()])
def test_a_cached_function_keeps_no_fake_tensor_and_a_flag_is_passed(table):
    if table is _table:  # cached here, because no cache is sought among what tests have imported
        table = lru_cache(table)
    task = task_of("m:f", (Cached(table), {"tokens": TOKENS, "is_scaled": True}), OPTIONS)
    assert [spec.name for spec in task.inputs] == ["tokens"]
    held(task)
    assert type(table(torch.device("cpu"))) is torch.Tensor


@pytest.mark.parametrize("name", ["gpt2_labels", "bert_span", "t5_labels"])
def test_the_loss_of_a_transformers_model_is_its_own(name):
    allow_torchvision()
    model, example = ZOO[f"transformers_{name}"].build()
    task = task_of("m:f", (model.eval(), example), OPTIONS)
    assert isinstance(task, LabelledTask)
    own = task.own_loss
    targets = join([example[spec.name] for spec in own.labels])
    inputs = [example[spec.name] for spec in task.inputs]
    mean = task.sum_loss(task.model(*inputs), targets) / own.count(targets)
    assert float(mean.detach()) == pytest.approx(float(model(**example).loss.detach()), rel=1e-5)
    # T5 makes its decoder's inputs from the labels.
    assert ("labels" in [spec.name for spec in task.inputs]) == (name == "t5_labels")
    held(task)


@pytest.mark.parametrize(
    ("form", "labels", "kind"),
    [
        ("smooth", torch.tensor([2, 5]), LabelledTask),
        ("one-hot", torch.tensor([2, 5]), LabelledTask),
        ("levels", torch.rand(2, 6), LabelledTask),
        ("squared", torch.tensor([2, 5]), BatchLossTask),
        ("beside", torch.tensor([2, 5]), BatchLossTask),
        ("classes", torch.tensor([2, 5]), BatchLossTask),
        ("weighted", torch.tensor([0.5, -1.0]), BatchLossTask),
    ],
)
def test_too_large_outputs_keep_all_but_torchs_losses_on_whole_batches(
    form, labels, kind, monkeypatch
):
    monkeypatch.setattr(loss_parts, "_LARGEST_CHECKED", 23)  # of four samples of six logits
    assert isinstance(scored(form, labels), kind)


@pytest.mark.parametrize(("tags", "kind"), [(TAGS, BatchLossTask), (TAGS.abs() % 5, LabelledTask)])
def test_too_large_outputs_keep_tokens_that_do_not_count_on_whole_batches(tags, kind, monkeypatch):
    monkeypatch.setattr(loss_parts, "_LARGEST_CHECKED", 0)
    assert isinstance(tagged(tags), kind)

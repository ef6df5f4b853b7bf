"""A loss that is all that a model returns is computed by parts of a batch if it is a mean."""

import pytest
import torch
import torch.nn.functional as F
from nets import users_task
from torch import nn

from harness.runtime.capture.capture import capture
from harness.runtime.faithfulness.comparison import hold_to_model

LABELS = torch.tensor([[0, 1, 2], [2, 1, 0]])


class Scored(nn.Module):
    """Four classes for each of three tokens, and a loss of them."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 4), nn.Parameter(torch.tensor(0.5))
        self.mse, self.smooth = nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1)
        self.divergence = nn.KLDivLoss(reduction="batchmean")
        self.loss = loss

    def forward(self, x, labels):
        return self.loss(self, self.layer(x), labels)


def of_all_kinds(m, z, y):
    loss = F.mse_loss(z, torch.zeros_like(z))
    loss += m.scale.square() * z.abs().mean()
    return (loss - 3).reshape(1).squeeze().double() / 4 + m.scale


def of_a_vae(m, z):
    made = F.mse_loss(z, torch.ones_like(z), reduction="sum")
    return made.double() - 0.5 * torch.sum(1 + z - z.exp()) / 3


def of_a_teacher(m, z):
    student, teacher = F.log_softmax(z, -1), F.softmax(z * 2, -1)
    found = F.kl_div(student, teacher, reduction="batchmean") * m.scale
    return found + m.divergence(student.view(-1, 4), teacher.view(-1, 4)) + z.mean()


def over_those_that_count(z, y):
    losses = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
    return losses.sum() / (y != -100).sum()


MEANS = {
    "flat cross entropy": lambda m, z, y: F.cross_entropy(z.view(-1, 4), y.view(-1)),
    "classes second": lambda m, z, y: m.smooth(z.transpose(1, 2), y),
    "sum of two": lambda m, z, y: F.l1_loss(z, z * 2) + 0.1 * z.mean(),
    "modules": lambda m, z, y: m.mse(z, torch.ones_like(z)) * m.scale,
    "labels of its own": lambda m, z, y: F.cross_entropy(z[:, 1:].mT, z.argmax(-1)[:, :-1]),
    "by names": lambda m, z, y: F.mse_loss(input=z, target=torch.ones_like(z)),
    "sum of all kinds": of_all_kinds,
    "mean of each sample's": lambda m, z, y: z.square().sum((1, 2)).mean(),
    "mean over named dims": lambda m, z, y: z.sum((1, 2)).mean(0) + z.square().mean(dim=(0, 1, 2)),
    "sum over the batch size": lambda m, z, y: of_a_vae(m, z) / z.size(0),
    "sum of labels that count": lambda m, z, y: (
        F.cross_entropy(z.mT, y, torch.arange(4.0), reduction="sum") / y.numel()
    ),
    "mean over the batch": lambda m, z, y: of_a_teacher(m, z),
    "labels that count": lambda m, z, y: over_those_that_count(z, y),
}


def over_some(z, y):
    return F.cross_entropy(z.transpose(1, 2), y.masked_fill(y == 3, -100))


def over_written(z, y):
    labels = y.clone()
    labels[y == 3] = -100
    return F.cross_entropy(z.transpose(1, 2), labels)


def over_filled(z, y):
    labels = y.clone()
    labels.masked_fill_(y == 3, -100)
    return F.cross_entropy(z.transpose(1, 2), labels)


OTHERS = {
    "labels that are written": (
        lambda m, z, y: over_written(z, y), "cross_entropy leaves out labels of -100",
    ),
    "labels that are filled": (
        lambda m, z, y: over_filled(z, y), "cross_entropy leaves out labels of -100",
    ),
    "labels that forward leaves out": (
        lambda m, z, y: over_some(z, y), "cross_entropy leaves out labels of -100",
    ),
    "a mask of such labels": (
        lambda m, z, y: over_those_that_count(z, y.masked_fill(y == 3, -100)), "div is no mean",
    ),
    "root": (lambda m, z, y: F.mse_loss(z, z * 2).sqrt(), "sqrt is no mean"),
    "sum": (lambda m, z, y: z.sum(), "sum is no mean"),
    "similarity": (
        lambda m, z, y: F.cosine_similarity(z.view(-1), z.exp().view(-1), dim=0),
        "cosine_similarity is no mean",
    ),
    "rounded": (
        lambda m, z, y: z.mean() + torch.div(z.mean(), 0.1, rounding_mode="floor"),
        "div is no mean",
    ),
    "weights": (
        lambda m, z, y: F.cross_entropy(z.view(-1, 4), y.view(-1), weight=torch.arange(4.0)),
        "cross_entropy has weights of classes",
    ),
    "padding": (
        lambda m, z, y: F.cross_entropy(z.view(-1, 4), y.view(-1), ignore_index=0),
        "cross_entropy leaves out labels of 0",
    ),
    "product": (lambda m, z, y: z.mean() * z.abs().mean(), "mul is no mean"),
    "no samples' share": (lambda m, z, y: z.mean((0, 1)).mean(), "mean is no mean"),
    "constant by the batch": (
        lambda m, z, y: (z.sum() + m.scale) / len(z), "divides what depends on no sample",
    ),
    "twice by the batch": (lambda m, z, y: z.sum() / len(z) / len(z), "truediv is no mean"),
    "by the batch": (lambda m, z, y: z.mean() / len(z), "mean is no sum"),
}  # fmt: skip


def captured(loss, labels=LABELS):
    task = users_task(Scored(loss), {"x": torch.rand(2, 3, 5), "labels": labels})
    return task, capture(task, 4, "m")


@pytest.mark.parametrize("name", MEANS)
def test_each_sample_has_its_share_of_a_mean(name, caplog):
    task, found = captured(MEANS[name])
    hold_to_model(task, found, "m")
    x, labels = torch.rand(4, 3, 5), torch.randint(4, (4, 3))
    losses = found.module(x, labels)
    assert losses.shape == (4,)
    torch.testing.assert_close(losses, torch.cat([found.module(*p) for p in parts(x, labels)]))
    torch.testing.assert_close(losses, torch.stack([task.model(*p)[0] for p in parts(x, labels)]))
    assert not caplog.records
    assert found.graph.mixing_operator() is None
    assert "sample" in found.graph.operators[-2].shape


def parts(*inputs):
    return zip(*(x.split(1) for x in inputs), strict=True)


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_stay_those_of_whole_batches(name, caplog):
    loss, reason = OTHERS[name]
    task, found = captured(loss)
    hold_to_model(task, found, "m")
    assert "leaves out microbatches: its forward returns the loss alone, and " in caplog.text
    assert reason in caplog.text
    x, labels = torch.rand(4, 3, 5), torch.randint(1, 4, (4, 3))
    torch.testing.assert_close(found.module(x, labels), task.model(x, labels))
    unread = [node.op for node in found.module.graph.nodes if not node.users]
    assert set(unread) <= {"output", "placeholder"}


def test_labels_that_do_not_count_in_the_example_keep_the_loss_whole(caplog):
    captured(MEANS["flat cross entropy"], torch.tensor([[0, -100, 2], [2, 1, 0]]))
    assert "cross_entropy leaves out labels of -100" in caplog.text

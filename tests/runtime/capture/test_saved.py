"""Bytes that operators keep until backward are those that autograd saves."""

import pytest
import torch
from nets import built_in, task_on
from torch import nn
from torch.nn import functional as F

from harness.domain.graph import INNER, INNER_HALF, KEPT, KEPT_HALF
from harness.runtime.capture.capture import capture
from harness.runtime.capture.meta_run import run_on_meta
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.models.torchvision_import import import_torchvision

BATCH = 4
TOKENS = InputSpec(name="x", shape=(8,), dtype=torch.int64, n_values=10)


class Residual(nn.Module):
    """Outputs written in place, and a sum that is read but not saved."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.skip = nn.Conv2d(3, 8, 1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        y = y + self.skip(x)
        return self.head(self.pool(self.relu(y)).flatten(1))


class Split(nn.Module):
    """Parts of one tensor, whose memory is kept once."""

    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Linear(8, 24), nn.Linear(8, 10)

    def forward(self, x):
        a, b, c = self.wide(x).chunk(3, dim=-1)
        return self.head(torch.tanh(a) * b + c)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        q, k, v = (m(x).view(len(x), 8, 2, 8).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.head(y.transpose(1, 2).reshape(len(x), 8, 16).mean(1))


class Tied(nn.Module):
    """A table that is also the last layer's weight, which autocast copies."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(10, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.norm(self.tokens(x)).mean(1))


def densenet():
    """Blocks and a transition of torchvision's class: maps that grow by concatenation."""
    return import_torchvision("models.densenet").DenseNet(8, (3, 2), 16, num_classes=10)


TASKS = {
    "residual": lambda: task_on(Residual(), 3, 8, 8),
    "split": lambda: task_on(Split(), 8),
    "attention": lambda: task_on(Attention(), 8, 16),
    "tied": lambda: Task(model=Tied(), inputs=(TOKENS,), n_classes=10),
    "lenet": lambda: built_in("lenet"),
    "resnet18": lambda: built_in("resnet18", n_classes=10),
    "densenet": lambda: task_on(densenet(), 3, 32, 32),
}


def saved_bytes(task, *, is_half):
    """What autograd saves in a forward on the CPU, without weights and inputs."""
    batch = draw_batch(task, BATCH, 0, torch.device("cpu"))
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_half),
    ):
        outputs = task.model(*batch.inputs)
        task.sum_loss(outputs, batch.targets)
    for known in (*task.model.parameters(), *task.model.buffers(), *batch.inputs):
        kept.pop(known.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("is_half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", TASKS)
def test_operators_keep_what_autograd_saves(name, is_half):
    task = TASKS[name]()
    graph = capture(task, BATCH, name).graph
    attribute = KEPT_HALF if is_half else KEPT
    kept = sum(operator.attrs.get(attribute, 0) for operator in graph.operators)
    # Targets, and statistics that a CPU keeps in another dtype.
    assert kept == pytest.approx(saved_bytes(task, is_half=is_half), rel=0.03, abs=300)


def product_and_gradient(x):
    y = x @ x
    return y + torch.func.grad(lambda z: (z**3).sum())(x)


def test_a_call_that_allows_no_hooks_counts_its_flops_once():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(product_and_gradient, (x,)))
    module = torch.fx.GraphModule(nn.Module(), graph)
    measured = run_on_meta(module, (torch.zeros(4, 4),))
    (found,) = (measured[n] for n in graph.nodes if n.op == "call_function")
    assert found.saved is None
    assert found.forward.total == 2 * 4**3


def test_an_output_that_nobody_saves_is_not_kept():
    graph = capture(TASKS["residual"](), BATCH, "residual").graph
    kept = {operator.name: operator.attrs.get(KEPT, 0) for operator in graph.operators}
    n_bytes = 4 * BATCH * 8 * 8 * 8
    assert kept["conv"] == n_bytes  # read by the batch norm
    assert n_bytes <= kept["norm"] < 1.1 * n_bytes  # overwritten by the relu, which saves it
    assert kept["skip"] == 0


def test_a_softmax_loss_keeps_its_log_softmax_and_not_the_logits():
    graph = capture(TASKS["lenet"](), BATCH, "lenet").graph
    found = {operator.kind: operator.attrs for operator in graph.operators}  # the last of each
    n_bytes = 4 * BATCH * 10
    assert (found["linear"][KEPT], found["loss"][KEPT], found["loss"][KEPT_HALF]) == (
        0, n_bytes, n_bytes,
    )  # fmt: skip
    # In backward the gradient of log-softmax; of fp32 logits, beside that of 16-bit logits.
    assert (found["loss"][INNER], found["loss"][INNER_HALF]) == (n_bytes, n_bytes * 3 // 2)


def test_kept_bytes_leave_a_graphs_hash_alone():
    graph = capture(TASKS["lenet"](), BATCH, "lenet").graph
    for operator in graph.operators:
        for name in (KEPT, KEPT_HALF, INNER, INNER_HALF):
            operator.attrs.pop(name, None)
    assert graph.content_hash() == capture(TASKS["lenet"](), BATCH, "lenet").graph.content_hash()

"""Models and runs without memory: copies, counted FLOPs, and products by letters."""

from unittest import mock

import pytest
import torch
from nets import built_in, held, task_on
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.domain.einsum import expert_dim
from harness.runtime.capture.capture import capture
from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.capture.meta_run import step_flops
from harness.runtime.models.task import TextOptions


def test_counting_without_memory_equals_counting_a_real_step():
    task = built_in("lenet")
    with FlopCounterMode(display=False) as counter:
        task.sum_loss(task.model(torch.randn(3, 1, 28, 28)), torch.tensor([1, 2, 3])).backward()
    assert step_flops(task, 3) == (counter.get_total_flops(), 0.0)


def test_a_vit_step_counts_about_three_forwards():
    with torch.device("meta"):
        task = built_in("vit_b_16")
    # 17.56 GMAC by torchvision's documentation, attention's products not among them.
    flops = step_flops(task, 1)
    assert flops is not None
    assert 3 * 2 * 16.8e9 < flops.total < 3 * 2 * 18.5e9


def test_a_decoder_counts_six_flops_a_parameter_and_token_beside_its_scores():
    sizes = TextOptions(
        sequence_length=16, vocabulary_size=50, n_layers=2, width=32, n_heads=4, mlp_width=64
    )
    task, tokens = built_in("llama", text=sizes), 3 * 16
    flops = step_flops(task, 3)
    assert flops is not None
    # Of 2 layers, forward and twice backward: scores and sums of 16 x 16 positions of width 32.
    assert flops.scores == 3 * 2 * 2 * (2 * 3 * 16 * 16 * 32)
    multiplied = [p for n, p in task.model.named_parameters() if p.dim() > 1 and "tokens" not in n]
    assert flops.total - flops.scores == 6 * tokens * sum(p.numel() for p in multiplied)


@pytest.mark.parametrize(
    ("layer", "n_places", "n_channels"),
    [(nn.Conv2d(4, 8, 3, groups=4), 7 * 7, 8), (nn.ConvTranspose2d(4, 8, 3, groups=4), 9 * 9, 4)],
)
def test_groups_of_channels_count_their_own_products(layer, n_places, n_channels):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    flops = step_flops(task_on(nn.Sequential(layer, *head), 4, 9, 9), 2)
    # An input channel for each output channel, or two output channels for each input channel.
    forward = 2 * 2 * n_places * 9 * n_channels * (8 // n_channels)
    assert flops is not None
    assert flops.total == 2 * forward + 3 * 2 * 2 * 8 * 3  # the input has no gradient


def test_an_lstm_counts_its_products_on_every_engine():
    sizes = TextOptions(sequence_length=4, vocabulary_size=10, n_layers=1, width=8)
    task = built_in("nmt", text=sizes)
    was_enabled = torch.backends.mkldnn.enabled
    flops = step_flops(task, 3)
    operators = capture(task, 3, "nmt").graph.operators
    assert flops is not None
    assert flops.total == sum(op.forward_flops + op.backward_flops for op in operators)
    assert torch.backends.mkldnn.enabled == was_enabled


def test_a_model_that_needs_values_is_not_counted():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)

    assert step_flops(task_on(Looks(), 8), 2) is None


class Slope(nn.Module):
    """The slope of its layers, of an input that has no gradient of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)[0]


def test_a_module_that_differentiates_is_one_operator_with_its_flops():
    task = task_on(nn.Sequential(Slope(), nn.Linear(4, 3)))
    slope = held(task, 6).graph.operators[1]
    assert (slope.name, slope.kind) == ("0", "other")
    assert slope.forward_flops == 2 * (2 * 6 * (4 * 5 + 5))  # forward, and to the input


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)


def test_nothing_is_copied_where_it_is_and_ties_stay():
    model = Tied()
    with mock.patch.object(torch.Tensor, "__deepcopy__", side_effect=AssertionError):
        copied = meta_copy(model)
    tensors = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert copied.second.weight is copied.first.weight
    assert isinstance(copied.first.weight, nn.Parameter)
    assert [p.requires_grad for p in copied.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert {name: t.shape for name, t in tensors.items()} == {
        name: t.shape for name, t in (*model.named_parameters(), *model.named_buffers())
    }


def test_a_weight_that_a_hook_computes_is_copied_without_memory():
    model = nn.utils.weight_norm(nn.Linear(3, 2))
    model(torch.ones(1, 3))
    copied = meta_copy(model)
    assert copied.weight.is_meta
    assert copied(torch.ones(4, 3, device="meta")).shape == (4, 2)


N, T, D, H, E = 4, 6, 8, 5, 3


class Product(nn.Module):
    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(shape)) if shape else None

    def forward(self, x):
        return self.function(x) if self.weight is None else self.function(x, self.weight)


# The function, the weight's shape, the equation, the summed letter, the dim of the experts, and
# whether samples mix.
CASES = {
    "stack of weights": (
        lambda x, w: torch.einsum("ntd,edh -> neth", x, w), (E, D, H),
        "ntd,*edh->neth", "d", None, False,
    ),
    "experts": (
        lambda x, w: torch.einsum("ntd,tdh->nth", x, w), (T, D, H),
        "ntd,*tdh->nth", "d", "seq", False,
    ),
    "weight first": (
        lambda x, w: torch.einsum("tdh,ntd->nth", w, x), (T, D, H),
        "*tdh,ntd->nth", "d", "seq", False,
    ),
    "dots": (
        lambda x, w: torch.einsum("...d, ...dh -> ...h", x, w), (T, D, H),
        "abd,*bdh->abh", "d", "seq", False,
    ),
    "activations": (
        lambda x: torch.einsum("ntd,nsd->nts", x, x), (), "ntd,nsd->nts", "d", None, False,
    ),
    "sum over samples": (
        lambda x: torch.einsum("ntd,nte->tde", x, x), (), "ntd,nte->tde", None, None, True,
    ),
    "two dims of samples": (
        lambda x: torch.einsum("ntd,mtd->nmt", x, x), (), None, None, None, True,
    ),
    "diagonal": (lambda x: torch.einsum("ntt->nt", x[:, :, :T]), (), None, None, None, False),
    "repeated dim": (
        lambda x, w: torch.einsum("ntd,tdh->nth", x, w), (1, D, H), None, None, None, False,
    ),
    "bmm": (
        lambda x, w: torch.bmm(x.transpose(0, 1), w), (T, D, H),
        "abc,*acd->abd", "c", "seq", False,
    ),
    "matmul": (
        lambda x, w: x.unsqueeze(2) @ w, (T, D, H), "abcd,*bde->abce", "d", "feature", False,
    ),
    "matmul by a matrix": (lambda x, w: x @ w, (D, H), None, None, None, False),
    "matmul of activations": (lambda x: x @ x.mT, (), None, None, None, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_are_described_by_letters(case):
    function, shape, equation, summed, experts, mixes = case
    graph = capture(task_on(Product(function, *shape), T, D), N, "one").graph
    operator = graph.operators[-2]
    assert operator.attrs.get("equation") == equation
    assert (operator.kind == "einsum") == (equation is not None)
    assert operator.attrs.get("summed") == summed
    assert expert_dim(operator) == experts
    assert bool(operator.attrs.get("mixes_samples")) == mixes
    assert operator.parameter_bytes == (4 * torch.Size(shape).numel() if shape else 0)

"""Products are described by letters: the model's tensors, the dim that is summed, mixed samples."""

import pytest
import torch
from torch import nn

from harness.domain.einsum import expert_dim
from harness.runtime.capture.capture import capture
from harness.runtime.models import InputSpec, Task

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
    spec = InputSpec(name="x", shape=(T, D))
    graph = capture(Task(model=Product(function, *shape), inputs=(spec,)), N, "one").graph
    operator = graph.operators[-2]
    assert operator.attrs.get("equation") == equation
    assert (operator.kind == "einsum") == (equation is not None)
    assert operator.attrs.get("summed") == summed
    assert expert_dim(operator) == experts
    assert bool(operator.attrs.get("mixes_samples")) == mixes
    assert operator.parameter_bytes == (4 * torch.Size(shape).numel() if shape else 0)

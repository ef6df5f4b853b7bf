"""A mixture of experts with a fixed capacity, whose experts can lie on different devices.

Every sample is a group of its own: an expert takes as many of its tokens as it has slots, first
choices before second ones, and drops the rest, whose residual goes on alone. So parts of a batch
and microbatches route their tokens as the whole batch does.

Sources: Lepikhin et al., "GShard", 2021 (groups, slots, dispatch by a product); Fedus et al.,
"Switch Transformers", 2022 (one choice); Jiang et al., "Mixtral of Experts", 2024 (SwiGLU experts).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.runtime.models.attention import GroupedAttention

_STD = 0.02  # of initial weights, as in `text.py`


class Router(nn.Module):
    """Chooses experts: tokens (n, length, width) to weights (n, length, experts, slots).

    A token has the weight of its expert at the slot that it takes there, and 0 elsewhere. The
    weights of its choices add up to 1 before any is dropped; a single one is its probability.

    Args:
        n_chosen: experts of a token.
        n_slots: tokens of a sample that an expert takes.
    """

    def __init__(self, width: int, n_experts: int, n_chosen: int, n_slots: int) -> None:
        super().__init__()
        self.n_experts, self.n_chosen, self.n_slots = n_experts, n_chosen, n_slots
        self.scores = nn.Linear(width, n_experts, bias=False)

    def extra_repr(self) -> str:
        return f"n_chosen={self.n_chosen}, n_slots={self.n_slots}"

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.scores(x).softmax(-1).topk(self.n_chosen)
        if self.n_chosen > 1:
            best = best / best.sum(-1, keepdim=True)
        choices = F.one_hot(chosen, self.n_experts).transpose(1, 2)  # (n, choice, token, expert)
        rows = choices.flatten(1, 2)
        slot = (rows * (rows.cumsum(1) - 1)).sum(-1).unflatten(1, choices.shape[1:3])
        slots = torch.arange(self.n_slots, device=x.device) == slot.unsqueeze(-1)
        weighted = choices * best.transpose(1, 2).unsqueeze(-1)
        return torch.einsum("nkte,nktc->ntec", weighted, slots.to(weighted.dtype))


class Mixture(nn.Module):
    """SwiGLU experts and their router: (n, length, width) to the same.

    Args:
        inner: width inside an expert.
        capacity_factor: slots of all experts over choices of all tokens.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        length: int,
        *,
        n_experts: int,
        n_chosen: int,
        capacity_factor: float,
    ) -> None:
        super().__init__()
        n_slots = min(length, math.ceil(capacity_factor * n_chosen * length / n_experts))
        self.router = Router(width, n_experts, n_chosen, n_slots)
        self.gate = nn.Parameter(torch.empty(n_experts, width, inner))
        self.up = nn.Parameter(torch.empty(n_experts, width, inner))
        self.down = nn.Parameter(torch.empty(n_experts, inner, width))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=_STD)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x)
        taken = torch.einsum("ntec,ntd->necd", weights.detach().sign(), x)
        inner = self.activation(torch.einsum("necd,edh->nech", taken, self.gate))
        inner = inner * torch.einsum("necd,edh->nech", taken, self.up)
        made = torch.einsum("nech,ehd->necd", inner, self.down)
        return torch.einsum("ntec,necd->ntd", weights, made)


def is_single_operator(module: nn.Module) -> bool:
    """Whether a graph keeps a module as one known operator."""
    return isinstance(module, GroupedAttention | Router)

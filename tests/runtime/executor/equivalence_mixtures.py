"""Mixtures of experts as users write them, for `equivalence_models`: (n, 6, 8) to 6 classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE = (6, 8)
_N_TOKENS, _WIDTH = SHAPE
_N_EXPERTS, _INNER, _N_SLOTS, _N_CLASSES = 4, 10, 2, 6


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, _N_EXPERTS)
        self.up = nn.Parameter(torch.empty(_N_EXPERTS, _WIDTH, _INNER))
        self.up_bias = nn.Parameter(torch.empty(_N_EXPERTS, 1, _INNER))
        self.down = nn.Parameter(torch.empty(_N_EXPERTS, _INNER, _WIDTH))
        self.head = nn.Linear(_WIDTH, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.mixed(x)).mean(1))

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OfSamples(_Mixture):
    """GShard's and Switch's: a token has one expert, an expert two tokens of each sample."""

    def mixed(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).max(-1)
        taken = F.one_hot(chosen, _N_EXPERTS)
        slot = (taken * (taken.cumsum(1) - 1)).sum(-1)
        slots = F.one_hot(slot.clamp(max=_N_SLOTS), _N_SLOTS + 1)[..., :_N_SLOTS]
        dispatch = torch.einsum("bse,bsc->bsec", taken.to(x.dtype), slots.to(x.dtype))
        given = torch.einsum("bsec,bsd->becd", dispatch, x)
        inner = F.gelu(torch.einsum("becd,edh->bech", given, self.up) + self.up_bias)
        made = torch.einsum("bech,ehd->becd", inner, self.down)
        return torch.einsum("bsec,becd->bsd", dispatch * best[..., None, None], made)


class OfBatch(_Mixture):
    """DeepSpeed's and Tutel's: an expert takes six tokens of the whole batch."""

    def mixed(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, _WIDTH)
        best, chosen = self.router(tokens).softmax(-1).max(-1)
        taken = F.one_hot(chosen, _N_EXPERTS)
        slot = (taken * (taken.cumsum(0) - 1)).sum(-1)
        slots = slot[:, None] == torch.arange(6)
        dispatch = torch.einsum("te,tc->tec", taken.to(x.dtype), slots.to(x.dtype))
        given = torch.einsum("tec,td->ecd", dispatch, tokens)
        inner = F.gelu(torch.bmm(given, self.up) + self.up_bias)
        made = torch.bmm(inner, self.down)
        mixed = torch.einsum("tec,ecd->td", dispatch * best[:, None, None], made)
        return mixed.reshape(x.shape)


class Soft(_Mixture):
    """Puigcerver et al., 2024: a slot takes a weighted mean of all tokens of its sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, _N_EXPERTS * _N_SLOTS)

    def mixed(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        given = (scores.softmax(1).mT @ x).unflatten(1, (_N_EXPERTS, _N_SLOTS))
        made = F.gelu(given @ self.up + self.up_bias) @ self.down
        return scores.softmax(2) @ made.flatten(1, 2)


MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "mixture_of_samples": OfSamples,
    "mixture_of_batch": OfBatch,
    "soft_mixture": Soft,
}

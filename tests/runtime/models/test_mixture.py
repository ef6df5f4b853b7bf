"""A mixture gives each token to its experts while they have slots, and drops it after that."""

import pytest
import torch
import torch.nn.functional as F

from harness.runtime.models.mixture import Mixture

N, T, D, H, E = 3, 10, 6, 8, 4


def by_tokens(mixture, x, n_chosen, n_slots):
    """Token by token, as the definition says; and the number of choices that are dropped."""
    found, n_dropped = torch.zeros_like(x), 0
    for k, sample in enumerate(x):
        p = (sample @ mixture.router.scores.weight.T).softmax(-1)
        best, chosen = p.topk(n_chosen)
        if n_chosen > 1:
            best = best / best.sum(-1, keepdim=True)
        n_taken = [0] * E
        for choice in range(n_chosen):
            for t in range(T):
                e = int(chosen[t, choice])
                n_taken[e] += 1
                if n_taken[e] > n_slots:
                    n_dropped += 1
                    continue
                inner = F.silu(sample[t] @ mixture.gate[e]) * (sample[t] @ mixture.up[e])
                found[k, t] += best[t, choice] * (inner @ mixture.down[e])
    return found, n_dropped


@pytest.mark.parametrize(
    ("n_chosen", "factor", "n_slots"), [(1, 1.25, 4), (2, 0.5, 3), (2, 2.0, 10), (4, 1.0, 10)]
)
def test_a_mixture_is_what_its_tokens_say(n_chosen, factor, n_slots):
    torch.manual_seed(0)
    mixture = Mixture(D, H, T, n_experts=E, n_chosen=n_chosen, capacity_factor=factor).double()
    for weight in mixture.parameters():
        torch.nn.init.normal_(weight)
    assert mixture.router.n_slots == n_slots
    x = torch.randn(N, T, D, dtype=torch.float64)
    wanted, n_dropped = by_tokens(mixture, x, n_chosen, n_slots)
    assert (n_dropped > 0) == (n_slots < T)
    gradient = torch.randn_like(wanted)
    weights = list(mixture.parameters())
    found = mixture(x)
    # Other orders of sums of up to 10 terms.
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    of_found = torch.autograd.grad(found, weights, gradient)
    of_wanted = torch.autograd.grad(wanted, weights, gradient)
    torch.testing.assert_close(of_found, of_wanted, rtol=1e-12, atol=1e-12)

"""Attention over keys of several devices, each of which is a thread, is that of one device."""

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from queue import Queue
from unittest import mock

import pytest
import torch

from harness.runtime.executor.shards import ring
from harness.runtime.models.attention import AttentionForm, mix_values

N_SAMPLES, N_GROUPS, LENGTH, HEAD_DIM = 2, 2, 11, 4
# float64 to rounding: sums of at most LENGTH terms in another order.
TOLERANCE = 1e-12


def draw(n_queries_each, *, has_table):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n_heads = N_GROUPS * n_queries_each
    q = 2 * tensor(N_SAMPLES, n_heads, LENGTH, HEAD_DIM)
    k, v = (tensor(N_SAMPLES, N_GROUPS, LENGTH, HEAD_DIM) for _ in range(2))
    return q, k, v, tensor(8, n_heads) if has_table else None


def rings(parts):
    """A ring of threads: the messages between two devices arrive in order."""
    queues = [Queue() for _ in parts]

    def passing(at):
        def start(tensor, shape):
            queues[(at + 1) % len(parts)].put(tensor.clone())

            def wait():
                found = queues[at].get(timeout=20)
                assert tuple(found.shape) == tuple(shape)
                return found

            return wait

        return start

    return [ring.KeyRing(tuple(parts), at, passing(at)) for at in range(len(parts))]


def trained(mix, form, q, k, v, table, mask, first, gradient):
    """Output, and gradients of queries, keys, values, table and a mask of numbers."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in (q, k, v, table)]
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.clone().requires_grad_())
        found = mix(form, *leaves, first)
    else:
        found = mix(form, *leaves, mask, first)
    found.backward(gradient)
    return [found.detach(), *(None if x is None else x.grad for x in leaves)]


def assert_equal(found, wanted):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("keys", ["gathered", "ring"])
@pytest.mark.parametrize("shares", [[6, 5], [3, 1, 7], [2, 3, 3, 3]])
@pytest.mark.parametrize(
    ("is_causal", "has_mask", "has_table", "n_queries_each", "n_scores"),
    [
        (False, False, False, 1, 1 << 20),
        (True, False, False, 1, 1 << 20),
        (True, False, False, 3, 1),  # grouped queries, one query at a time
        (False, True, False, 2, 200),
        (True, True, True, 2, 100),
        (False, "of numbers", False, 2, 200),
    ],
)
def test_it_is_that_of_one_device(
    keys, shares, is_causal, has_mask, has_table, n_queries_each, n_scores
):
    form = AttentionForm(
        head_dim=HEAD_DIM, queries_per_group=n_queries_each, is_causal=is_causal, scale=0.4
    )
    q, k, v, table = draw(n_queries_each, has_table=has_table)
    mask = None
    if has_mask:
        # Of a sample of padding alone, PyTorch's fused kernel has wrong gradients; with a table it
        # is not used.
        mask = torch.arange(LENGTH)[None] < torch.tensor([[4], [0 if has_table else 1]])
        mask = mask[:, None, None]
    if has_mask == "of numbers":  # of each head, query and key; the last query sees nothing
        mask = torch.randn(1, q.shape[1], LENGTH, LENGTH, dtype=q.dtype)
        mask[..., 5] = mask[:, :, -1] = -torch.inf
    gradient = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    wanted = trained(mix_values, form, q, k, v, table, mask, 0, gradient)

    parts = list(pairwise([0, *accumulate(shares)]))

    def run(one):
        start, stop = one.blocks[one.at]
        own = [x[:, :, start:stop] for x in (q, k, v)]
        rows = mask if mask is None or mask.shape[2] == 1 else mask[:, :, start:stop]
        mix = ring.make_mix(keys, one)
        return trained(mix, form, *own, table, rows, start, gradient[:, :, start:stop])

    with mock.patch.dict(ring._N_SCORES, cpu=n_scores), ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(run, rings(parts)))
    for at in range(4):
        assert_equal(torch.cat([each[at] for each in found], dim=2), wanted[at])
    if has_table:
        assert_equal(sum(each[4] for each in found), wanted[4])
    for each in wanted[5:]:
        assert_equal(torch.cat([own[5] for own in found], dim=2), each)


def test_half_precision_loses_no_more_than_its_own_rounding():
    q, k, v, _ = draw(1, has_table=False)
    form = AttentionForm(head_dim=HEAD_DIM)
    parts = [(0, 6), (6, LENGTH)]
    wanted = mix_values(form, q, k, v, None, None, 0)

    def run(one):
        start, stop = one.blocks[one.at]
        own = [x[:, :, start:stop].bfloat16() for x in (q, k, v)]
        found = ring.make_mix("ring", one)(form, *own, None, None, start)
        assert found.dtype == torch.bfloat16
        return found.double()

    with ThreadPoolExecutor(2) as pool:
        found = torch.cat(list(pool.map(run, rings(parts))), dim=2)
    # bfloat16 has 8 bits: inputs, scores up to 20 and weights are rounded to 2^-9 of their size.
    assert (found - wanted).abs().max() <= 0.1

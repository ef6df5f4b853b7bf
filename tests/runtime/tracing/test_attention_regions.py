"""Attentions of transformers become operators that are cut by groups of heads."""

import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
from equivalence_strategies import small_cluster
from zoo import ZOO

from harness.domain.partition import REPLICA
from harness.plan.builders import tensor_parallel
from harness.runtime.capture.capture import capture
from harness.runtime.tracing.attention_region import AttentionRegion
from harness.runtime.tracing.trace import trace


class _ArgumentsOf(fx.Interpreter):
    """Runs a graph and keeps the arguments of one node."""

    def __init__(self, module, node):
        super().__init__(module)
        self._node, self.found = node, ()

    def run_node(self, n):
        if n is self._node:
            self.found, _ = self.fetch_args_kwargs_from_env(n)
        return super().run_node(n)


def part_of(region, arguments, groups):
    """The partial sum of some groups, from slices of the weights."""
    weights = []
    for rule, weight in zip(region.weights, arguments[region.n_inputs :], strict=True):
        intervals = rule.intervals(groups, region.n_groups)
        pieces = [weight.narrow(rule.dim, a, b - a) for a, b in intervals]
        whole = None if rule.is_last_bias and groups[0] else weight
        weights.append(torch.cat(pieces, dim=rule.dim) if pieces else whole)
    return region.part(groups)(*arguments[: region.n_inputs], *weights)


# Queries, keys and values of GPT-2 are one product; two heads of Llama's queries share a group.
# Scores of T5 get relative positions of each head; eager attentions are products of their own.
# Bloom and DeBERTa merge samples and heads; each head of Bloom has its queries, keys and values
# beside each other. Models of timm stack queries, keys and values. GPT-J rotates pairs.
@pytest.mark.parametrize(
    ("name", "n_regions", "n_groups", "sections"),
    [
        ("transformers_bert", 2, 4, ((0, 16),)),
        ("transformers_gpt2", 2, 4, ((0, 16), (16, 32), (32, 48))),
        ("transformers_llama", 2, 2, ((0, 16),)),
        ("transformers_llama_eager", 2, 2, ((0, 16),)),
        ("transformers_t5", 3, 4, ((0, 16),)),
        ("transformers_bart", 3, 4, ((0, 16),)),
        ("transformers_bloom", 2, 4, ((0, 48),)),
        ("transformers_gptj", 2, 4, ((0, 16),)),
        ("transformers_deberta_v2", 2, 4, ((0, 16),)),
        ("timm_vit_tiny_patch16_224", 2, 4, ((0, 16), (16, 32), (32, 48))),
    ],
)
def test_the_parts_of_an_attention_add_up(name, n_regions, n_groups, sections):
    task = ZOO[name].task()
    captured = capture(task, 4, name)
    regions = {k: n for k, n in captured.nodes.items() if isinstance(n.target, AttentionRegion)}
    assert len(regions) == n_regions
    operator, node = next(iter(regions.items()))
    region = node.target
    assert (region.n_groups, region.weights[0].sections) == (n_groups, sections)
    inputs = [
        torch.randint(spec.n_values, (3, *spec.shape))
        if spec.n_values
        else torch.randn(3, *spec.shape, dtype=spec.dtype)
        for spec in task.inputs
    ]
    run = _ArgumentsOf(captured.module, node)
    run.run(*inputs)
    parts = [part_of(region, run.found, groups) for groups in ((0, 1), (1, n_groups))]
    torch.testing.assert_close(sum(parts), region(*run.found), rtol=1e-12, atol=1e-14)
    plans = tensor_parallel(captured.graph, small_cluster(2), 4).operators
    assert plans[operator].partition == {"heads": 2}
    # Of a linear layer's two, the first is cut by features and the second by its contraction, but
    # for Bloom's, whose activation is an autograd function.
    cuts = [set(plan.partition) - {REPLICA} for plan in plans.values()]
    assert cuts.count({"contraction"}) >= 1 + (name != "transformers_bloom")


class OneHead(nn.Module):
    """An exported attention whose heads are a dim of one."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        if x.sum(1).shape[0] < 0:  # torch.fx cannot follow it
            return x
        q, k, v = (part(x).view(-1, 4, 1, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        made = torch.softmax(q @ k.transpose(2, 3), dim=-1) @ v
        return self.out(made.transpose(1, 2).reshape(-1, 4, 8))


def test_an_attention_of_one_head_stays_in_pieces():
    module = trace(OneHead(), (torch.zeros(2, 4, 8),))
    assert not any(isinstance(node.target, AttentionRegion) for node in module.graph.nodes)

"""Attentions of transformers become operators that are cut by heads and by positions."""

from functools import partial

import pytest
import torch
from equivalence_attentions import N_TOKENS, SHAPE, Reader, Relative
from made_graphs import small_cluster
from nets import Heads, held, users_task
from torch import fx, nn
from zoo import ZOO

from harness.domain.key_forms import key_forms
from harness.domain.partition import REPLICA
from harness.plan.builders import tensor_parallel
from harness.runtime.capture.capture import capture
from harness.runtime.models.attention import mix_values
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.tracing.attention_region import AttentionRegion, OwnPositions
from harness.runtime.tracing.trace import trace

TOKENS = (InputSpec(name="x", shape=SHAPE, dtype=torch.int64, n_values=N_TOKENS),)


class _ArgumentsOf(fx.Interpreter):
    """Runs a graph and keeps the arguments of one node."""

    def __init__(self, module, node):
        super().__init__(module)
        self._node, self.found = node, ()

    def run_node(self, n):
        if n is self._node:
            self.found, _ = self.fetch_args_kwargs_from_env(n)
        return super().run_node(n)


def part_of(region, arguments, groups, rows=None, mix=None):
    """The partial sum of some groups, from slices of the weights, at some positions."""
    weights, inputs = [], arguments[: region.n_inputs]
    if rows is not None:
        owned = ("rows", "keys") if rows.has_own_keys else ("rows",)
        inputs = [
            x[:, slice(*rows.interval)] if reads in owned else x
            for x, reads in zip(inputs, region.positions.reads, strict=True)
        ]
    for rule, weight in zip(region.weights, arguments[region.n_inputs :], strict=True):
        intervals = rule.intervals(groups, region.n_groups)
        pieces = [weight.narrow(rule.dim, a, b - a) for a, b in intervals]
        whole = None if rule.is_last_bias and groups[0] else weight
        weights.append(torch.cat(pieces, dim=rule.dim) if pieces else whole)
    mixes = [] if rows is None else [mix]
    return region.part(groups, rows)(*inputs, *weights, *mixes)


def wholes_by_positions(region, arguments):
    """The parts of all positions together: devices compute all keys, or give each other theirs."""
    blocks = [(0, 3), (3, 4), (4, region.positions.n)]
    mixing, known = region.positions.mixing, []

    def mix(start, q, k, v, mask):
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
        return mix_values(mixing.form, q, k, v, None, mask, start)

    def note(start, q, k, v, mask):
        known.append((k, v))
        return q

    def gather(start, q, k, v, mask):
        return mix(start, q, *(torch.cat(parts, 2) for parts in zip(*known, strict=True)), mask)

    def whole(has_own_keys, function):
        return torch.cat([
            part_of(region, arguments, (0, region.n_groups), OwnPositions(block, has_own_keys),
                    partial(function, block[0]))
            for block in blocks
        ], 1)  # fmt: skip

    yield whole(False, mix)
    if mixing is not None:
        whole(True, note)
        yield whole(True, gather)


def check_parts(module, node, inputs):
    """Compare the sum of a region's parts, and those of its positions, with the region."""
    run, region = _ArgumentsOf(module, node), node.target
    run.run(*inputs)
    parts = [part_of(region, run.found, groups) for groups in ((0, 1), (1, region.n_groups))]
    whole = region(*run.found)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-14)
    for made in wholes_by_positions(region, run.found) if region.positions else ():
        torch.testing.assert_close(made, whole, rtol=1e-12, atol=1e-14)


# Queries, keys and values of GPT-2 are one product; two heads of Llama's queries share a group.
# Scores of T5 get relative positions of each head; eager attentions are products of their own.
# Bloom and DeBERTa merge samples and heads; each head of Bloom has its queries, keys and values
# beside each other. Models of timm stack queries, keys and values. GPT-J rotates pairs. XLM masks
# scores in place and has an empty cache. Swin merges windows with the samples, and its second
# version divides by norms and joins biases.
# All but DeBERTa's are cut by positions; where scores are more than scaled and masked, and where a
# softmax rounds float64, each device has all keys.
@pytest.mark.parametrize(
    ("name", "n_regions", "n_groups", "sections", "keys"),
    [
        ("transformers_gpt2", 2, 4, ((0, 16), (16, 32), (32, 48)), "any"),
        ("transformers_llama", 2, 2, ((0, 16),), "any"),
        ("transformers_llama_eager", 2, 2, ((0, 16),), "input"),
        ("transformers_t5", 3, 4, ((0, 16),), "any"),
        ("transformers_bloom", 2, 4, ((0, 48),), "input"),
        ("transformers_gptj", 2, 4, ((0, 16),), "any"),
        ("transformers_deberta_v2", 2, 4, ((0, 16),), None),
        ("transformers_xlm", 2, 4, ((0, 16),), "input"),
        ("timm_swinv2_tiny_window8_256", 2, 2, ((0, 8), (8, 16), (16, 24)), "input"),
    ],
)
def test_the_parts_of_an_attention_add_up(name, n_regions, n_groups, sections, keys):
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
    assert keys == (region.positions and ("any" if region.positions.mixing else "input"))
    check_parts(captured.module, node, inputs)
    plans = tensor_parallel(captured.graph, small_cluster(2), 4).operators
    assert plans[operator].partition == {"heads": 2}
    # Of a linear layer's two, the first is cut by features and the second by its contraction, but
    # for Bloom's, whose activation is an autograd function.
    cuts = [set(plan.partition) - {REPLICA} for plan in plans.values()]
    assert cuts.count({"contraction"}) >= 1 + (name != "transformers_bloom")


def test_dropped_probabilities_are_part_of_the_form_of_an_attention():
    model = Reader(Relative)
    model.attentions[0].dropout.p = 0.3
    captured = capture(Task(model=model, inputs=TOKENS), 2, "dropped")
    (node,) = (n for n in captured.nodes.values() if isinstance(n.target, AttentionRegion))
    form = node.target.positions.mixing.form
    assert (form.dropout, form.scale, form.queries_per_group) == (0.3, 0.5, 1)
    (attention,) = (op for op in captured.graph.operators if op.kind == "attention")
    assert key_forms(attention, captured.graph) == ("input", "gathered")


def test_an_attention_of_one_head_stays_in_pieces():
    module = trace(Heads(1), (torch.zeros(2, 5, 8),))
    assert not any(isinstance(node.target, AttentionRegion) for node in module.graph.nodes)


class Stacked(Heads):
    """Products of stacks of matrices; its softmax counts its dim from the first."""

    def __init__(self):
        super().__init__(2)
        self.softmax = nn.Softmax(dim=2)

    def forward(self, x):
        sizes = (x.shape[0], 5, 2, 4)
        q, k, v = (part(x).view(sizes).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k, v = (each.reshape(-1, 5, 4) for each in (q, k, v))
        made = torch.bmm(self.softmax(torch.bmm(q, k.transpose(1, 2))), v)
        return self.out(made.view(len(x), 2, 5, 4).transpose(1, 2).reshape(len(x), 5, 8))


def test_a_softmax_of_stacked_matrices_stays_on_their_columns():
    nodes = held(users_task(Stacked(), (torch.zeros(2, 5, 8),))).nodes.values()
    assert [type(node.target) for node in nodes] == [AttentionRegion]


class Mixed(nn.Module):
    """Stacked keys and values beside queries, norms of them, sinks beside the scores, a gate."""

    def __init__(self):
        super().__init__()
        self.q, self.gate, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.kv = nn.Linear(8, 16)
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.RMSNorm(4)
        self.sinks = nn.Parameter(torch.randn(2))
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.0)

    def forward(self, x):
        q = self.q(x).view(len(x), 6, 2, 4).transpose(1, 2)
        kv = nn.functional.linear(x, self.kv.weight, self.kv.bias).view(len(x), 6, 2, 2, 4)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.q_norm(q) @ self.k_norm(k).transpose(2, 3)
        scores = torch.cat((scores, self.sinks.view(1, 2, 1, 1).expand(len(x), 2, 6, 1)), dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        made = self.drop(self.softmax(scores)[..., :-1]) @ v
        return self.out(self.gate(x).sigmoid() * made.transpose(1, 2).reshape(len(x), 6, 8))


def test_norms_sinks_and_gates_are_part_of_an_attention():
    module = trace(Mixed().double(), (torch.zeros(2, 6, 8, dtype=torch.float64),))
    (node,) = [n for n in module.graph.nodes if isinstance(n.target, AttentionRegion)]
    assert sorted(w.sections for w in node.target.weights)[-1] == ((0, 8), (8, 16))
    check_parts(module, node, [torch.randn(5, 6, 8, dtype=torch.float64)])


class Gated(nn.Module):
    """A softmax that no linear layer follows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Conv1d(1, 1, 1)

    def forward(self, x):
        return self.last(self.first(x).softmax(-1)[:, None]).flatten(1)


def test_a_softmax_that_is_no_attention_costs_no_export(monkeypatch):
    monkeypatch.setattr("harness.runtime.tracing.trace._exported", lambda *_: pytest.fail("export"))
    trace(Gated(), (torch.zeros(2, 8),))

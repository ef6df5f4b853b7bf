"""Models of text train what one device trains, by whatever cut; sequences have unlike lengths."""

import math
from collections import Counter

import pytest
import torch
from equivalence_models import TEXT_MODELS, small_described, small_graph
from equivalence_named import assert_trained, make_case
from equivalence_reference import train_alone
from equivalence_training import train_in_fp16
from msgspec.structs import replace

from harness.domain.key_forms import key_forms
from harness.domain.partition import count_parts
from harness.domain.strategy import OperatorPlan
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.forms import choose_forms
from harness.runtime.executor.shards.loss import CutCrossEntropy
from harness.runtime.models.task import IGNORED

STRATEGIES = [
    *((model, name) for model in TEXT_MODELS for name in ("tensor parallel", "zero_bubble")),
    *((model, "ddp") for model in ("gpt2", "bert_span")),
]


@pytest.mark.parametrize(("model", "name"), STRATEGIES)
def test_a_model_of_text_trains_what_one_device_trains(model, name, ranks):
    assert_trained(make_case(model, name), ranks)


@pytest.mark.parametrize(
    ("model", "cuts", "keys"),
    [
        ("llama", {"seq": 2}, "input"),
        ("t5", {"seq": 2}, "gathered"),  # masks, relative positions, another sequence's keys
        ("llama", {"seq": 3}, "gathered"),
        ("t5", {"seq": 3}, "ring"),
        ("bert_span", {"seq": [1, 3]}, "ring"),
        ("vit", {"seq": 3}, "ring"),  # nn.MultiheadAttention
        ("gpt2", {"seq": 2, "heads": 2}, "ring"),
        ("llama", {"seq": 4}, "ring"),
    ],
)
def test_attention_by_positions_trains_what_one_device_trains(model, cuts, keys, ranks):
    case = make_case(model, "tensor parallel")
    n_ranks = count_parts(cuts)
    kinds = {op.name: op.kind for op in small_graph(model).operators}
    plan = OperatorPlan(cuts, list(range(n_ranks))[::-1], keys=keys)
    plans = {
        name: plan if kinds[name] == "attention" else own
        for name, own in case.strategy.operators.items()
    }
    strategy = replace(case.strategy, operators=plans)
    case = replace(case, n_ranks=n_ranks, strategy=strategy)
    forms = {form for name, form in forms_of(case).of.items() if kinds[name] == "attention"}
    assert forms == {"shard" if keys == "input" else "collective"}
    assert_trained(case, ranks)


@pytest.mark.parametrize(("cuts", "first"), [({"seq": [1, 2]}, 0), ({"seq": 3}, 1)])
def test_attentions_as_transformers_and_timm_write_them_train_by_positions(cuts, first, ranks):
    case = make_case("attentions", "ddp")
    graph, n_ranks = small_graph("attentions"), count_parts(cuts)
    attentions = [op for op in graph.operators if op.kind == "attention"]
    plans = {name: OperatorPlan({}, [0]) for name in case.strategy.operators}
    for k, op in enumerate(attentions):
        keys = key_forms(op, graph)
        plans[op.name] = OperatorPlan(
            cuts, list(range(n_ranks)), keys=keys[-1 - (first + k) % len(keys)]
        )
    case = replace(case, n_ranks=n_ranks, strategy=replace(case.strategy, operators=plans))
    forms = forms_of(case).of
    assert {forms[op.name] for op in attentions} == {"shard", "collective"}
    assert_trained(case, ranks)


def forms_of(case):
    """The forms of all operators for a whole batch, and the layout."""
    batch, plan = case.strategy.batch, ExecutorPlan(strategy=case.strategy)
    return choose_forms(*small_described(case.model), plan, [batch])[batch]


def received(model, name):
    """Elements that device 0 receives in a forward pass, by value; and the forms of operators."""
    forms = forms_of(make_case(model, name))
    found: Counter[str] = Counter()
    for want in forms.layout.wants:
        if want.device == 0:
            for piece in want.pieces:
                if piece.part.device != 0:
                    found[want.value] += math.prod(stop - start for start, stop in piece.region)
    return found, forms.of


# A table cut by its rows, which is tied, gives half of a sum; one cut by columns half of a half.
@pytest.mark.parametrize(("model", "of_table"), [("gpt2", 2), ("llama", 1)])
def test_tensor_parallel_moves_half_of_each_sum_and_no_logits(model, of_table):
    found, forms = received(model, "tensor parallel")
    quarter = 8 * 8 * 16 // 4  # samples, positions, width
    # Two blocks: what their attentions and MLPs read and give; then the norm before the logits.
    norms = sum(n for value, n in found.items() if "norm" in value)
    sums = sum(n for value, n in found.items() if value.endswith(("attention", "mlp_down")))
    assert (norms, sums, found["tokens_1"]) == (10 * quarter, 8 * quarter, of_table * quarter)
    assert sum(found.values()) == (18 + of_table) * quarter
    assert "gathered" not in forms.values()
    assert forms["loss"] == "collective"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cut_cross_entropy_is_the_whole_one(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 4, 10, generator=generator) * 30).to(dtype).requires_grad_()
    targets = torch.randint(10, (3, 4), generator=generator)
    targets[1, 2:] = IGNORED
    whole = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).double(), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    (wanted,) = torch.autograd.grad(whole, logits)
    cuts = [(0, 3), (3, 4), (4, 10)]
    rows: list[torch.Tensor] = []

    def note(x):
        rows.append(x.clone())
        return x

    def compute(reduce):
        parts = []
        for index, (first, last) in enumerate(cuts):
            own = logits.detach()[..., first:last].clone().requires_grad_()
            loss = CutCrossEntropy((first, last), index, 3, reduce, None, 10)
            value = loss(own, targets, torch.tensor(1.0))
            value.backward()
            parts.append((float(value.detach()), own.grad))
        return parts

    compute(note)
    parts = compute(lambda _: torch.stack(rows[:3]).sum(0))
    # float64 to rounding; sums of bfloat16 are in float32, whose gradients are rounded to bfloat16.
    exact = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    assert sum(value for value, _ in parts) == pytest.approx(float(whole.detach()), rel=1e-6)
    torch.testing.assert_close(torch.cat([g for _, g in parts], 2), wanted, **exact)


@pytest.mark.parametrize("name", ["tensor parallel", "1f1b"])
def test_fp16_skips_a_step_that_overflows_on_all_ranks(name, ranks):
    case = replace(make_case("gpt2", name), dtype="float32", n_steps=2)
    by_rank = ranks.run(2, train_in_fp16, case)
    losses = [sum(loss for loss, *_ in step) for step in zip(*by_rank, strict=True)]
    # fp16 keeps 11 bits; losses are means of sums of about 20 terms of it.
    assert losses[:2] == pytest.approx(train_alone(case).losses, rel=5e-3)
    for steps in by_rank:
        assert [factor for _, factor, _ in steps] == [2.0**k for k in (16, 16, 59, 58, 57)]
        assert [changed for *_, changed in steps] == [True, True, False, False, False]

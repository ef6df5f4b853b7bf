"""Frozen operators run forward alone: their price in seconds, transfers and bytes."""

import pytest
from made_graphs import changed
from simulated import ZERO, cluster_of, model, op, simulate

from harness.domain.strategy import OperatorPlan, Stage
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import events


def three(kinds=("linear", "linear", "linear"), untrained="", **attrs):
    """x -> a (80 B of weights, 32 B out) -> b (40 B, 16 B out) -> c (8 B, 8 B out); 1 + 3 s each,
    so a product's input gradients take 1 s and its weights' 2 s.

    Args:
        untrained: operators whose weights the model does not train.
    """
    sizes = (("a", "x", 4, 80), ("b", "a", 2, 40), ("c", "b", 1, 8))
    operators = [
        op(
            name,
            [before],
            features,
            n_bytes,
            kind=kind,
            **attrs | ({"frozen_bytes": n_bytes} if name in untrained else {}),
        )
        for kind, (name, before, features, n_bytes) in zip(kinds, sizes, strict=True)
    ]
    return model(operators, (1.0, 3.0))


def frozen(*names, **options):
    return SimulatorOptions(frozen=frozenset(names), **options)


@pytest.mark.parametrize(
    ("names", "kinds", "step_s"),
    [
        ("", "linear", 3 + 9),
        ("a", "linear", 3 + 2 + 3),  # b computes its weights' gradients alone
        ("ab", "linear", 3 + 2),
        ("ab", "layer_norm", 3 + 3),  # whose passes are not apart
        ("b", "linear", 3 + 3 + 1 + 3),  # passes gradients on to a
        ("abc", "linear", 3),
    ],
)
def test_a_frozen_prefix_has_no_backward(names, kinds, step_s):
    graph, profile = three((kinds,) * 3)
    plans = dict.fromkeys("abc", ZERO)
    found = simulate(graph, profile, cluster_of(1), plans, options=frozen(*names))
    assert found.step_s == step_s


def test_cached_operators_take_no_time_and_send_nothing():
    graph, profile = three()
    plans = {"a": ZERO, "b": ZERO, "c": OperatorPlan({}, [1], 1)}
    options = frozen("a", "b", skipped=frozenset("ab"))
    found = simulate(
        graph, profile, cluster_of(2), plans, options=options, stages=[Stage(), Stage()]
    )
    assert found.step_s == 1 + 2  # of c


def test_no_gradient_returns_through_integers():
    """As the indices of experts, which b chooses by a's output."""
    graph, profile = three()
    plans = {name: OperatorPlan({}, [at]) for at, name in enumerate("abc")}
    for dtype, n_back in (("float32", 2), ("int64", 1)):  # a has one from any reader
        graph = changed(graph, "b", dtype=dtype, parameter_bytes=0)
        found = simulate(graph, profile, cluster_of(3), plans)
        back = [one for one in events(found) if one.span.kind == "communication"]
        assert sum(one.span.pass_ == "backward" for one in back) == n_back


def test_frozen_dropout_is_off():
    graph, profile = three(function="Dropout")
    plans = dict.fromkeys("abc", ZERO)
    found = simulate(graph, profile, cluster_of(1), plans, options=frozen("a", "b"))
    assert found.step_s == 1 + 2  # of c


@pytest.mark.parametrize("is_models", [False, True])
@pytest.mark.parametrize(
    ("names", "static", "activations"),
    [
        # Weights, gradients and one state; a's output in its backward, the last.
        ("", 3 * 128, 32),
        # a's output is read by b's backward.
        ("a", 80 + 3 * 48, 32 + 16),
        # Alive together: a's and b's outputs while b runs, when c has no gradient of 8 B yet.
        ("ab", 120 + 3 * 8, 32 + 16 - 8),
        ("abc", 128, 32 + 16),
    ],
)
def test_a_frozen_prefix_keeps_weights_alone(names, static, activations, is_models):
    graph, profile = three(untrained=names if is_models else "")
    plans, options = dict.fromkeys("abc", ZERO), frozen(*("" if is_models else names))
    found = simulate(graph, profile, cluster_of(1), plans, options=options).outcome
    assert found.static_bytes.tolist() == [static]
    assert found.memory_bytes.tolist() == [static + activations]


def test_weights_that_the_model_does_not_train_are_neither_reduced_nor_updated():
    graph, profile = three(untrained="ab")
    plans = dict.fromkeys("abc", OperatorPlan({"sample": 2}, [0, 1]))
    options = frozen(optimizer_s_per_byte=0.1)
    found = simulate(graph, profile, cluster_of(), plans, options=options)
    assert found.outcome.lowered.buckets.n_bytes.tolist() == [8]
    assert found.outcome.optimizer_s.tolist() == pytest.approx([0.8, 0.8])


def test_frozen_weights_are_neither_reduced_nor_updated():
    graph, profile = three()
    plans = dict.fromkeys("abc", OperatorPlan({"sample": 2}, [0, 1]))
    options = frozen("a", "b", optimizer_s_per_byte=0.1, stream_s_per_byte=0.01)
    found = simulate(graph, profile, cluster_of(), plans, options=options)
    assert found.outcome.lowered.buckets.n_bytes.tolist() == [8]
    assert found.outcome.optimizer_s.tolist() == pytest.approx([0.8, 0.8])
    # Forward, c's weight gradients and their copy into the bucket.
    summed_s = 2 * 4 / 16
    assert found.step_s == pytest.approx(1.5 + 1.0 + 0.16 + summed_s + 0.8)


@pytest.mark.parametrize("names", ["", "a"])
def test_no_gradient_returns_to_the_prefix_and_it_is_not_recomputed(names):
    graph, profile = three()
    plans = {"a": ZERO, **{name: OperatorPlan({}, [1], stage=1) for name in "bc"}}
    stages = [Stage(recompute=True)] * 2
    found = simulate(graph, profile, cluster_of(), plans, options=frozen(*names), stages=stages)
    passes = [
        event.span.pass_
        for event in events(found)
        if event.ranks in ((1, 0), (0,)) and event.span.duration_s
    ]
    assert passes == [None] if names else [None, "backward", "recompute", None]


@pytest.mark.parametrize(
    ("names", "attrs", "n_summed"),
    [
        ("", {}, 2),
        ("a", {}, 1),  # b's input has no gradient
        ("ab", {}, 0),
        ("", {"untrained": "a"}, 1),
        ("", {"statistics": "frozen"}, 0),  # in evaluation mode
    ],
)
def test_batch_norms_share_statistics_of_what_has_them(names, attrs, n_summed):
    graph, profile = three(("linear", "batch_norm", "linear"), **attrs)
    plans = dict.fromkeys("abc", OperatorPlan({"sample": 2}, [0, 1]))
    options = frozen(*names, batch_norm="global")
    found = simulate(graph, profile, cluster_of(), plans, options=options)
    labels = [event.span.label for event in events(found)]
    assert sum(label.endswith("statistics of b") for label in labels) == n_summed

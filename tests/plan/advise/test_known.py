"""A plan that a search of the same results has found counts for its machines."""

import itertools
from dataclasses import replace

import msgspec
import pytest
from made_graphs import GB, layers
from made_runs import header_of

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.prediction import Prediction
from harness.domain.record import Sample
from harness.measure.store import write_header
from harness.plan import builders
from harness.plan.advise.advice import Adviser
from harness.plan.advise.measured import KnownPlan, known_plans, uncertainty_of
from harness.plan.advise.pricing import AdviceRequest, factor_of, price
from harness.plan.advise.sets import part_of
from harness.plan.report import describe_strategy

GRAPH, PROFILE = layers(4)
PAIR = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=1e9, memory_bytes=GB)
FASTER = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=1e10, memory_bytes=GB)


@pytest.fixture
def plan():
    strategy = builders.ddp(GRAPH, PAIR, GRAPH.batch)
    return msgspec.structs.replace(
        strategy, name="mine", made_for=fingerprint(GRAPH, PAIR, PROFILE)
    )


def known(strategy, cluster, **more):
    name = describe_strategy(strategy, GRAPH)
    return KnownPlan(cluster=cluster, batch=strategy.batch, name=name, strategy=strategy, **more)


def test_a_known_plan_is_priced_on_its_machines_at_its_batch(plan):
    request = AdviceRequest(
        graph=GRAPH,
        profile=PROFILE,
        batch=GRAPH.batch,
        families=("searched",),
        known=(known(plan, PAIR),),
    )
    found = price(request, PAIR)
    assert (found.label, found.step_s) == ("searched: mine", pytest.approx(6.0, rel=0.01))
    assert price(request, FASTER) is None
    assert price(replace(request, batch=2 * GRAPH.batch), PAIR) is None
    assert price(replace(request, families=("ddp",)), PAIR).label == "ddp"


def test_no_prediction_is_preferred_to_the_plan_that_trial_steps_chose():
    fast = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=1e12, memory_bytes=GB)
    slow = builders.ddp(GRAPH, fast, GRAPH.batch, shares=[7, 1])
    chosen = msgspec.structs.replace(slow, name="chosen")
    request = AdviceRequest(
        graph=GRAPH, profile=PROFILE, batch=GRAPH.batch, known=(known(chosen, fast),)
    )
    best = price(request, fast)
    assert best.label == "tensor parallel"
    raced = replace(request, known=(known(chosen, fast, step_s=12.0, is_raced=True),))
    tried = price(raced, fast)
    assert (tried.label, tried.step_s) == ("searched: chosen", 12.0)
    assert tried.predicted_s == pytest.approx(10.5, rel=0.01)
    # What other machines would bring is predicted, and as optimistic as the best prediction here.
    factor = factor_of(raced, [tried])
    assert factor == 12.0 / best.step_s > 1
    assert best.at(factor).step_s == 12.0
    assert factor_of(request, [best]) == 1


def test_a_plan_that_lost_its_trial_is_not_advised_again():
    fast = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=1e12, memory_bytes=GB)
    lost = builders.tensor_parallel(GRAPH, fast, GRAPH.batch)
    plan = replace(known(lost, fast, step_s=13.0, is_raced=True), strategy=None)
    request = AdviceRequest(graph=GRAPH, profile=PROFILE, batch=GRAPH.batch)
    assert Adviser(request, fast, seconds=60.0).advise().best.cluster.n_devices == 2
    advice = Adviser(replace(request, known=(plan,)), fast, seconds=60.0).advise()
    assert advice.best.cluster.n_devices == 1
    both = next(one for one in advice.sets if one.cluster.n_devices == 2)
    assert (both.label, both.step_s, both.is_measured) == ("tensor parallel", 13.0, True)


def write_search(results, k, strategy, steps):
    """A search that tried plans: name, and predicted and measured seconds."""
    run = results / f"run{k}"
    run.mkdir()
    header = header_of(
        run_id=run.name, workload="search", status="ok", config={"model": "m"}, cluster=PAIR,
        start_utc=f"2026-01-0{k + 1}T00:00:00+00:00",
    )  # fmt: skip
    write_header(run, header)
    (run / "strategy.json").write_bytes(strategy.to_json())
    prediction = Prediction(strategy=strategy.name, method="search", step_s=6.0)
    (run / "prediction.json").write_bytes(prediction.to_json())
    samples = [
        Sample(metric=metric, value=value, labels={"plan": name})
        for name, *values in steps
        for metric, value in zip(("trial_predicted_step_s", "trial_step_s"), values, strict=True)
    ]
    (run / "rank0.jsonl").write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in samples))


def test_the_plans_that_searches_with_the_same_measurements_found_or_tried_are_known(
    tmp_path, plan
):
    def found(cluster=PAIR, optimizer="momentum"):
        plans = known_plans(tmp_path, GRAPH, cluster, PROFILE, optimizer)
        return {(one.name, one.step_s, one.is_raced, one.strategy is not None) for one in plans}

    write_search(tmp_path, 0, msgspec.structs.replace(plan, name="older"), [])
    assert found() == {("older", None, False, True)}
    write_search(tmp_path, 1, msgspec.structs.replace(plan, name="newer"), [])
    assert found() == {("newer", None, False, True)}
    write_search(tmp_path, 2, plan, [("mine", 6.0, 7.0), ("other", 5.0, 8.0)])
    assert found() == {("mine", 7.0, True, True), ("other", 8.0, True, False)}
    assert found(optimizer="adamw") == {("mine", None, False, True)}
    assert found(cluster=FASTER) == set()
    assert known_plans(None, GRAPH, PAIR, PROFILE, "momentum") == ()


def test_plans_of_some_of_the_machines_are_known_for_them(tmp_path, plan):
    three = Cluster.uniform(3, 1, kind="device", inside_bytes_per_s=1e9, memory_bytes=GB)
    made_for = fingerprint(GRAPH, three.part([0, 1]), PROFILE)
    write_search(
        tmp_path, 0, msgspec.structs.replace(plan, made_for=made_for), [("mine", 6.0, 7.0)]
    )
    alone = msgspec.structs.replace(builders.single(GRAPH, 8), name="alone", made_for=made_for)
    write_search(tmp_path, 1, alone, [("alone", 12.0, 12.5)])
    found = known_plans(tmp_path, GRAPH, three, PROFILE, "momentum")
    assert [(one.name, one.cluster, one.step_s) for one in found] == [
        ("alone", part_of(three, [0]), 12.5),  # it leaves node1 idle
        ("mine", part_of(three, [0, 1]), 7.0),
    ]


def test_trial_steps_count_in_the_range(tmp_path, plan):
    write_search(tmp_path, 0, plan, [("mine", 6.0, 7.2), ("other", 5.0, 6.25)])
    found = uncertainty_of(tmp_path, PAIR)
    assert found.n_strategies == 2
    assert found.of("searched") == (1.0, 1.25) == (found.low, found.high)


def test_a_busy_host_changes_no_search(monkeypatch):
    unlike = PAIR.with_devices(
        msgspec.structs.replace(device, speed=1.0 - 0.3 * k)
        for k, device in enumerate(PAIR.devices)
    )
    families = ("tensor", "searched")  # a search ends earlier beside a strategy that fits
    request = AdviceRequest(graph=GRAPH, profile=PROFILE, batch=GRAPH.batch, families=families)
    quiet = price(request, unlike, search_cpu_s=60.0)
    assert quiet.label.startswith("searched: ")
    now_s = itertools.count(step=1000)
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    assert price(request, unlike, search_cpu_s=60.0) == quiet

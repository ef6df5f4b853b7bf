"""A plan that a search of the same results has found counts for its machines."""

import itertools
from dataclasses import replace

import msgspec
import pytest
from made_graphs import GB, layers
from made_runs import header_of

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.measure.store import write_header
from harness.plan import builders
from harness.plan.advise.advice import Adviser
from harness.plan.advise.command import _known_plan
from harness.plan.advise.pricing import AdviceRequest, price

GRAPH, PROFILE = layers(4)
PAIR = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=1e9, memory_bytes=GB)
FASTER = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=1e10, memory_bytes=GB)


@pytest.fixture
def plan():
    strategy = builders.ddp(GRAPH, PAIR, GRAPH.batch)
    return msgspec.structs.replace(
        strategy, name="mine", made_for=fingerprint(GRAPH, PAIR, PROFILE)
    )


def test_a_known_plan_is_priced_on_its_machines_at_its_batch(plan):
    request = AdviceRequest(
        graph=GRAPH, profile=PROFILE, batch=GRAPH.batch, families=("searched",), known=plan
    )
    found = price(request, PAIR)
    assert (found.label, found.step_s) == ("searched: mine", pytest.approx(6.0, rel=0.01))
    assert price(request, FASTER) is None
    assert price(replace(request, batch=2 * GRAPH.batch), PAIR) is None
    assert price(replace(request, families=("ddp",)), PAIR).label == "ddp"


def test_no_prediction_is_preferred_to_the_plan_that_trial_steps_chose(plan):
    fast = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=1e12, memory_bytes=GB)
    slow = builders.ddp(GRAPH, fast, GRAPH.batch, shares=[7, 1])
    made_for = fingerprint(GRAPH, fast, PROFILE)
    chosen = msgspec.structs.replace(slow, name="chosen", made_for=made_for)
    request = AdviceRequest(graph=GRAPH, profile=PROFILE, batch=GRAPH.batch, known=chosen)
    assert price(request, fast).label == "tensor parallel"
    tried = price(replace(request, is_tried=True), fast)
    assert (tried.label, tried.step_s) == ("searched: chosen", pytest.approx(10.5, rel=0.01))
    # One that leaves a node idle is no plan of this set.
    alone = msgspec.structs.replace(
        builders.single(GRAPH, GRAPH.batch), name="alone", made_for=made_for
    )
    idle = price(replace(request, known=alone, is_tried=True), fast)
    assert idle.label == "tensor parallel"
    # What other machines would bring is predicted, and no trial speaks for it.
    adviser = Adviser(replace(request, is_tried=True), fast, seconds=1.0)
    assert adviser._factor_of_trials(tried) == tried.step_s / price(request, fast).step_s > 1
    assert Adviser(request, fast, seconds=1.0)._factor_of_trials(tried) == 1


@pytest.mark.parametrize("status", ["ok", "crash"])
def test_the_newest_search_with_the_same_measurements_is_known(tmp_path, plan, status):
    for k, name in enumerate(("older", "newer")):
        run = tmp_path / f"run{k}"
        run.mkdir()
        header = header_of(
            run_id=run.name, workload="search", status="ok" if k == 0 else status,
            start_utc=f"2026-01-0{k + 1}T00:00:00+00:00", config={"trials": 1 + 3 * k},
        )  # fmt: skip
        write_header(run, header)
        (run / "strategy.json").write_bytes(msgspec.structs.replace(plan, name=name).to_json())
    known, is_tried = _known_plan(tmp_path, GRAPH, PAIR, PROFILE)
    assert known.name == ("newer" if status == "ok" else "older")
    assert is_tried == (status == "ok")
    assert _known_plan(tmp_path, GRAPH, FASTER, PROFILE) == (None, False)
    assert _known_plan(None, GRAPH, PAIR, PROFILE) == (None, False)


def test_a_busy_host_changes_no_search(monkeypatch):
    unlike = PAIR.with_devices(
        msgspec.structs.replace(device, speed=1.0 - 0.3 * k)
        for k, device in enumerate(PAIR.devices)
    )
    request = AdviceRequest(graph=GRAPH, profile=PROFILE, batch=GRAPH.batch, families=("searched",))
    quiet = price(request, unlike, search_cpu_s=60.0)
    now_s = itertools.count(step=1000)
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    assert price(request, unlike, search_cpu_s=60.0) == quiet is not None

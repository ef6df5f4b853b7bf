"""A plan that a search of the same results has found counts for its machines."""

from dataclasses import replace

import msgspec
import pytest
from made_graphs import GB, layers
from made_runs import header_of

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.measure.store import write_header
from harness.plan import builders
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


@pytest.mark.parametrize("status", ["ok", "crash"])
def test_the_newest_search_with_the_same_measurements_is_known(tmp_path, plan, status):
    for k, name in enumerate(("older", "newer")):
        run = tmp_path / f"run{k}"
        run.mkdir()
        header = header_of(
            run_id=run.name, workload="search", status="ok" if k == 0 else status,
            start_utc=f"2026-01-0{k + 1}T00:00:00+00:00",
        )  # fmt: skip
        write_header(run, header)
        (run / "strategy.json").write_bytes(msgspec.structs.replace(plan, name=name).to_json())
    known = _known_plan(tmp_path, GRAPH, PAIR, PROFILE)
    assert known.name == ("newer" if status == "ok" else "older")
    assert _known_plan(tmp_path, GRAPH, FASTER, PROFILE) is None
    assert _known_plan(None, GRAPH, PAIR, PROFILE) is None

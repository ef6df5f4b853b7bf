"""A step of asynchronous training, worked out by hand."""

import pytest
from simulated import cluster_of, row

from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.measure.rank_records import Records
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator
from harness.plan.simulate.unflushed import simulate_unflushed

# Of all 8 samples, forward and backward; a byte per element.
SECONDS = {"a": (4.0, 8.0), "b": (4.0, 8.0)}


def run(n_microbatches, plans, *, n_devices=2, bandwidth=1e30, **options):
    graph, profile = row({"a": 10, "b": 20}, SECONDS)
    cluster = cluster_of(n_devices, bandwidth)
    strategy = Strategy(
        name="s",
        batch=8,
        operators=plans,
        n_microbatches=n_microbatches,
        schedule="1f1b",
        stages=[Stage()] * (1 + max(plan.stage for plan in plans.values())),
    )
    simulator = Simulator(graph, profile, cluster, options=SimulatorOptions(**options))
    return simulate_unflushed(simulator, strategy), simulator.simulate(strategy)


TWO_STAGES = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1], 1)}


@pytest.mark.parametrize("n_microbatches", [1, 2, 4, 8])
def test_a_balanced_pipeline_never_idles(n_microbatches):
    found, flushed = run(n_microbatches, TWO_STAGES)
    assert found.step_s == pytest.approx(12.0, abs=1e-9)
    assert flushed.step_s > 12.5


def test_each_microbatch_updates_and_the_slowest_stage_paces():
    # Two microbatches of 2 + 4 s each; updates take 1 s on rank 0, 2 s on rank 1.
    found, _ = run(2, TWO_STAGES, optimizer_s_per_byte=0.1)
    assert found.step_s == pytest.approx(2 * (2 + 4 + 2), abs=1e-9)
    (own,) = Records.of(found.spans[1]).by_step.values()
    busy = [s for s in own if s.kind not in ("communication", "step")]
    assert sorted((s.kind, s.label, s.duration_s) for s in busy) == [
        ("backward", "b #0", pytest.approx(4.0)),
        ("backward", "b #1", pytest.approx(4.0)),
        ("forward", "b #0", pytest.approx(2.0)),
        ("forward", "b #1", pytest.approx(2.0)),
        ("optimizer", "weights of b #0", pytest.approx(2.0)),
        ("optimizer", "weights of b #1", pytest.approx(2.0)),
    ]


def test_a_replicated_stage_sums_its_gradients_before_each_update():
    plans = {"a": OperatorPlan({"sample": 2}, [0, 1]), "b": OperatorPlan({}, [2], 1)}
    found, _ = run(2, plans, n_devices=3, bandwidth=10.0, optimizer_s_per_byte=0.1)
    (own,) = Records.of(found.spans[1]).by_step.values()
    sums = [s for s in own if s.name.startswith("all-reduce a")]
    # A ring of two sends 2 * 5 bytes at 10 B/s.
    assert [s.kind for s in sums] == ["communication"] * 2
    assert [s.duration_s for s in sums] == pytest.approx([1.0, 1.0])
    updates = [s for s in own if s.kind == "optimizer"]
    assert [s.duration_s for s in updates] == pytest.approx([1.0, 1.0])
    assert all(
        u.start_s == pytest.approx(s.start_s + 1.0) for s, u in zip(sums, updates, strict=True)
    )


def test_a_version_of_the_weights_is_kept_for_each_microbatch_in_flight():
    found, flushed = run(4, TWO_STAGES)
    kept = {name: found.memory_bytes[name] - n for name, n in flushed.memory_bytes.items()}
    assert kept == {"node0:0": 2 * 10, "node0:1": 20}

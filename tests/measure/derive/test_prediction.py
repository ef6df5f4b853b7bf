"""A simulated pipeline beside records written by hand: errors, parts, stages, memory."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import run_of
from simulated import row

from harness.domain.cluster import Cluster
from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.record import Sample, Span
from harness.errors import ResultsError, StrategyError
from harness.measure.derive.prediction import (
    PARTS,
    RankedStrategy,
    cell_summary,
    middle_steps,
    predicted_run,
    predicted_stages,
    read_prediction,
    read_strategy,
    unpredicted_traffic,
)
from harness.plan.builders import pipeline
from harness.plan.simulate.report import spans as simulated_spans
from harness.plan.simulate.simulator import Simulator


def simulated():
    """a, b | c, d on two devices, two microbatches: forward 2 s, 2 s | 1 s, 1 s of the batch."""
    seconds = {"a": (2.0, 4.0), "b": (2.0, 4.0), "c": (1.0, 2.0), "d": (1.0, 2.0)}
    graph, profile = row(dict.fromkeys(seconds, 80), seconds)
    cluster = Cluster.uniform(2, 1, inside_bytes_per_s=1e9, memory_bytes=10**6)
    strategy = pipeline(graph, 8, ["ab", "cd"], [[0], [1]], n_microbatches=2)
    simulation = Simulator(graph, profile, cluster).simulate(strategy)
    prediction = Prediction(
        strategy=strategy.name,
        method="builder",
        step_s=simulation.step_s,
        memory_bytes=simulation.memory_bytes,
        spans={str(rank): spans for rank, spans in simulated_spans(simulation).items()},
    )
    return strategy, prediction


def step(number, stretch):
    """data 0-1, forward 1-4 with a wait 2-3 in it, backward 4-8, bucket 6-10, optimizer 10-11,
    end 12."""
    layout = [
        ("step", {}, 0, 12),
        ("data", {}, 0, 1),
        ("forward", {"stage": 0, "microbatch": 0}, 1, 4),
        ("communication", {"is_wait": True}, 2, 3),
        ("backward", {"stage": 0, "microbatch": 0}, 4, 8),
        ("communication", {"name": "bucket0"}, 6, 10),
        ("optimizer", {}, 10, 11),
    ]
    return [
        Span(
            kind=kind,
            step=number,
            start_s=1000.0 * number + start * stretch,
            duration_s=(stop - start) * stretch,
            **fields,
        )
        for kind, fields, start, stop in layout
    ]


def test_error_is_predicted_over_the_median_measured_step():
    _, prediction = simulated()
    records = [record for n, stretch in enumerate((1, 2, 50)) for record in step(n, stretch)]
    found = predicted_run(run_of(records), prediction)
    assert found.measured.median == 24.0
    assert found.error == pytest.approx(prediction.step_s / 24 - 1)


def test_a_prediction_is_compared_with_full_batches():
    _, prediction = simulated()
    records = [record for n, stretch in enumerate((2, 1)) for record in step(n, stretch)]
    sizes = [Sample(metric="n_samples", value=n, step=at) for at, n in enumerate((8, 4))]
    found = predicted_run(run_of([*records, *sizes]), prediction)
    assert found.measured.median == 24.0
    assert sum(found.measured_parts.values()) == pytest.approx(24)


def test_measured_parts_sum_to_the_middle_step_and_leave_waits_out_of_computing():
    _, prediction = simulated()
    # The middle half of 1, 1, 1 and 9 is the first three: the outlier weighs nothing.
    records = [record for n, stretch in enumerate((1, 1, 1, 9)) for record in step(n, stretch)]
    found = predicted_run(run_of(records), prediction)
    # Exposed: the wait, and 8-10.
    expected = dict(zip(PARTS[:1] + PARTS[2:], (6, 3, 1, 2), strict=True))
    assert found.measured_parts == pytest.approx(expected)
    assert sum(found.measured_parts.values()) == pytest.approx(12)
    assert middle_steps({0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0}) == {0, 1, 2}


def contending(prediction, seconds):
    return msgspec.structs.replace(prediction, contention_s={"0": seconds, "1": seconds})


def alone(seconds):
    return [
        Sample(metric="no_sync_compute_s", value=value, step=n)
        for n, value in enumerate((seconds, seconds, 100 * seconds))
    ]


def test_contention_is_what_computing_takes_beyond_steps_without_communication():
    prediction = contending(simulated()[1], 0.5)
    found = predicted_run(run_of([*step(0, 1), *alone(5.5)]), prediction)
    expected = dict(zip(PARTS, (4.5, 1.5, 3, 1, 2), strict=True))  # 6 + 1 s, alone 5.5 s
    assert found.measured_parts == pytest.approx(expected)
    assert found.predicted_parts["compute"] == pytest.approx(9 - 0.5)
    assert found.predicted_parts["contention"] == 0.5
    assert sum(found.predicted_parts.values()) == pytest.approx(prediction.step_s)


@pytest.mark.parametrize(
    ("is_predicted", "ranks"),
    [
        (True, [step(0, 1)]),
        (False, [[*step(0, 1), *alone(5.5)]]),
        (True, [[*step(0, 1), *alone(5.5)], step(0, 1)]),
    ],
    ids=["not measured", "not predicted", "not measured on one rank"],
)
def test_unknown_contention_is_a_part_of_compute_on_both_sides(is_predicted, ranks):
    prediction = simulated()[1]
    told = contending(prediction, 0.5) if is_predicted else prediction
    found = predicted_run(run_of(*ranks), told)
    assert found.measured_parts.keys() == found.predicted_parts.keys() == set(PARTS[:1] + PARTS[2:])
    assert found.measured_parts["compute"] == pytest.approx(6)
    assert found.predicted_parts["compute"] == pytest.approx(9)


def test_predicted_parts_sum_to_the_predicted_step():
    _, prediction = simulated()
    found = predicted_run(run_of([]), prediction)
    # Both ranks compute (4 + 8) and (2 + 4) seconds: the mean is 9.
    assert found.predicted_parts["compute"] == pytest.approx(9)
    assert found.predicted_parts["rest"] == 0
    assert sum(found.predicted_parts.values()) == pytest.approx(prediction.step_s)
    optimizer_s = found.predicted_parts["optimizer"]
    idle = 1 - (9 + optimizer_s) / prediction.step_s
    assert found.predicted_bubble == pytest.approx(idle)
    assert found.measured is None
    assert found.error is None


def test_an_invalid_run_has_no_measured_number():
    _, prediction = simulated()
    found = predicted_run(run_of(step(0, 1), status="invalid"), prediction)
    assert (found.measured, found.measured_parts) == (None, {})


def test_predicted_stages_are_one_microbatchs_as_the_measured_ones():
    first, second = predicted_stages(simulated()[1])
    assert (first.ranks, second.ranks) == ((0,), (1,))
    # Half of the batch's seconds.
    assert (first.forward_s, first.backward_s) == (pytest.approx(2), pytest.approx(4))
    assert (second.forward_s, second.backward_s) == (pytest.approx(1), pytest.approx(2))
    assert first.recompute_s == 0


def test_memory_is_matched_by_host_and_place_on_it():
    _, prediction = simulated()
    peak = Sample(metric="memory_peak_bytes", value=500, labels={"kind": "rss"})
    found = predicted_run(run_of([peak], [], hosts=("node1", "node0")), prediction)
    assert [m.predicted_bytes for m in found.memory] == [
        prediction.memory_bytes["node1:0"],
        prediction.memory_bytes["node0:0"],
    ]
    assert [m.measured_bytes for m in found.memory] == [{"rss": 500}, {}]


def test_files_beside_a_run_may_be_absent_and_are_named_when_malformed(tmp_path):
    strategy, prediction = simulated()
    assert read_prediction(tmp_path) is None
    assert read_strategy(tmp_path) is None
    (tmp_path / PREDICTION_FILE).write_bytes(prediction.to_json())
    (tmp_path / STRATEGY_FILE).write_bytes(strategy.to_json())
    assert read_prediction(tmp_path) == prediction
    assert read_strategy(tmp_path) == strategy
    (tmp_path / PREDICTION_FILE).write_text('{"strategy": ')
    (tmp_path / STRATEGY_FILE).write_text('{"name": 3}')
    with pytest.raises(ResultsError, match=r"prediction\.json"):
        read_prediction(tmp_path)
    with pytest.raises(StrategyError, match=r"strategy\.json"):
        read_strategy(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": {"rank0": []}}, "'rank0', which is not a rank"),
        ({"step_s": 0.0}, "at least 1e-09 s"),
    ],
)
def test_a_prediction_that_makes_no_sense_is_refused(tmp_path, changes, message):
    _, prediction = simulated()
    changed = {**msgspec.json.decode(prediction.to_json()), **changes}
    (tmp_path / PREDICTION_FILE).write_bytes(msgspec.json.encode(changed))
    with pytest.raises(ResultsError, match=rf"prediction\.json.*{message}"):
        read_prediction(tmp_path)


def judged(*pairs):
    """Strategies s0, s1, ... of (predicted, measured) seconds."""
    return [
        RankedStrategy(name=f"s{i}", predicted_s=predicted, measured_s=measured)
        for i, (predicted, measured) in enumerate(pairs)
    ]


def test_error_is_relative_to_the_measured_step():
    assert judged((0.9, 1.0))[0].error == pytest.approx(-0.1)
    cell = cell_summary(judged((0.9, 1.0), (2.4, 2.0), (3.0, 3.0)))
    assert (cell.median_error, cell.worst_error) == (pytest.approx(0.1), pytest.approx(0.2))


def test_regret_is_what_the_predicted_choice_costs():
    cell = cell_summary(judged((1.0, 1.1), (1.2, 1.0), (2.0, 2.0)))
    assert (cell.chosen, cell.best) == ("s0", "s1")
    assert cell.regret == pytest.approx(0.1)
    assert cell.rank_correlation == pytest.approx(0.5)  # 1 - 6 x 2 / (3 x 8)


@pytest.mark.parametrize(
    ("predicted_s", "chosen", "regret"),
    [(0.9, "broken", None), (1.0, "broken", None), (1.1, "s0", 0.1)],
)
def test_a_choice_that_failed_has_no_regret(predicted_s, chosen, regret):
    cell = cell_summary(judged((1.0, 1.1), (1.2, 1.0)), {"broken": predicted_s, "later": 5.0})
    assert (cell.chosen, cell.n_strategies, cell.n_failed) == (chosen, 2, 2)
    assert cell.regret == (None if regret is None else pytest.approx(regret))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=9))
def test_correlation_is_spearmans(pairs):
    from scipy.stats import spearmanr  # not in every worker, which collects all tests

    found = cell_summary(judged(*pairs)).rank_correlation
    if found is not None:
        # Both are sums of a few ranks in double precision.
        expected = spearmanr([p for p, _ in pairs], [m for _, m in pairs]).statistic
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_node_that_sends_more_than_predicted_is_named():
    prediction = Prediction(
        strategy="ddp", method="builder", step_s=1.0, sent_bytes={"0": 4 << 20, "1": 4 << 20}
    )

    def found(*mib, **named):
        sent = ([Sample(metric="nic_sent_bytes", value=n * 2**20, step=0)] for n in mib)
        return unpredicted_traffic(predicted_run(run_of(*sent, **named), prediction))

    assert found(5.5, 8.0, hosts=["node0"] * 2) == ""  # the counters are those of its loopback
    assert found(4.9, 0.0) == ""
    assert found(5.5, 8.0) == (
        "rank 1 sends 8 MiB a step instead of 4 MiB: the prediction lacks a transfer, or another "
        "program uses the network interface"
    )

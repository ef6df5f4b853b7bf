"""Strategies against each other: who is the baseline, what compares, what is left out."""

from dataclasses import replace

import msgspec
import pytest
from made_runs import run_of

from harness.domain.record import Sample, Span
from harness.measure.derive.changes import as_planned
from harness.measure.derive.strategies import StrategyRow, strategy_finding, strategy_tables
from harness.measure.derive.training import training_summary
from harness.measure.statistics import verdict


def trained(strategy, n_ranks, step_s, *, status="ok", **config):
    """A run of three steps of `step_s` with 12 samples each."""
    records = []
    for step in range(3 if status == "ok" else 0):
        records.append(Span(kind="step", start_s=10.0 * step, duration_s=step_s, step=step))
        records.append(
            Sample(metric="n_samples", value=12 / n_ranks, time_s=10.0 * step, step=step)
        )
    return run_of(
        *[records] * n_ranks,
        config={"model": "lenet", "dtype": "fp32", "batch": 12, "engine": "torch",
                "strategy": strategy, "n_ranks": n_ranks, **config},
        status=status,
    )  # fmt: skip


def table(*runs):
    tables = strategy_tables([(run, training_summary(run)) for run in runs])
    return [row for rows in tables if len(rows) > 1 for row in rows]


def test_single_is_the_baseline_in_whatever_order_runs_were_carried_out():
    ddp, single = trained("ddp", 2, 1.0), trained("single", 1, 3.0)
    first, second = table(ddp, single)
    assert (first.strategy, first.speedup, first.verdict) == ("single on 1", None, None)
    assert (second.strategy, second.against) == ("ddp on 2", "single on 1")
    assert second.speedup == 3.0
    assert (first.throughput, second.throughput) == (4.0, 12.0)
    assert second.workload == "lenet fp32 batch 12"


def test_single_of_another_engine_is_the_baseline_where_plain_single_is_missing():
    executor = {"engine": "executor"}
    first, second = table(trained("dp=2", 2, 1.0), trained("single", 1, 3.0, **executor))
    assert (first.strategy, second.speedup) == ("executor-single on 1", 3.0)


def test_channels_last_order_is_compared_with_the_usual_one():
    usual, last = table(trained("single", 1, 3.0), trained("single", 1, 2.0, channels_last=True))
    assert (usual.strategy, last.strategy) == ("single on 1", "single-channels-last on 1")
    assert last.speedup == 1.5


def test_one_repeat_each_is_inconclusive_and_says_how_many_more():
    row = table(trained("single", 1, 3.0), trained("ddp", 2, 1.0))[1]
    assert row.verdict.outcome == "inconclusive"
    # The fewest of each side whose full separation reads p < 0.002 are 7.
    assert row.verdict.n_more == 6


def test_separate_repeats_are_faster_by_the_ratio_of_their_medians():
    singles = [trained("single", 1, 3.0 + 0.01 * i) for i in range(9)]
    ddps = [trained("ddp", 2, 1.0 + 0.01 * i) for i in range(9)]
    row = table(*singles, *ddps)[1]
    assert (row.verdict.outcome, len(row.step_s), row.n_started) == ("faster", 9, 9)
    assert row.speedup == pytest.approx(3.04 / 1.04)


def test_runs_by_other_settings_of_a_search_are_no_repeats():
    counts = (2, 2, 10)
    runs = [trained("searched", 2, 12.0 - k, trials=k, predict=k > 2) for k in counts]
    first, second = table(*runs)
    assert [row.strategy for row in (first, second)] == [
        f"searched on 2 · trials {k}" for k in (2, 10)
    ]
    assert (first.n_started, second.n_started, second.speedup) == (2, 1, 5.0)
    # ddp has no use for this flag.
    alike = [trained("ddp", 2, 3.0, trials=k) for k in (1, 2)]
    assert [row.n_started for row in table(*alike, trained("single", 1, 1.0))] == [1, 2]


def test_logs_of_other_programs_are_compared_and_no_repeats():
    names = ("zero1", "zero2", "zero2")
    rows = table(*(trained(names[k], 2, 3.0 - k, source=f"{k}.log") for k in range(3)))
    assert [row.strategy for row in rows] == ["zero1 on 2", "zero2 on 2 · run", "zero2 on 2 · run"]
    assert [row.speedup for row in rows] == [None, 1.5, 3.0]


def test_runs_of_other_lengths_are_compared_and_no_repeats():
    runs = [trained("ddp", 2, 1.0, steps=k, evaluate=k > 9) for k in (5, 10)]
    rows = table(trained("single", 1, 2.0, steps=50, profiler_steps=3), *runs)
    assert [row.strategy for row in rows] == [
        "single on 1", "ddp on 2 · evaluate · steps 10", "ddp on 2 · steps 5",
    ]  # fmt: skip
    assert [row.speedup for row in rows] == [None, 2.0, 2.0]


def test_a_failed_repeat_counts_as_started_only():
    failed = trained("ddp", 2, 1.0, status="oom")
    rows = table(trained("single", 1, 3.0), trained("ddp", 2, 1.0), failed)
    assert (rows[1].step_s, rows[1].n_started) == ((1.0,), 2)


def test_a_strategy_that_always_fails_keeps_its_row_and_the_others_compare():
    single, ddp = trained("single", 1, 3.0, status="oom"), trained("ddp", 2, 1.0)
    rows = table(single, ddp, trained("ddp", 4, 0.5))
    assert [(row.strategy, row.against) for row in rows] == [
        ("single on 1", ""),
        ("ddp on 2", ""),
        ("ddp on 4", "ddp on 2"),
    ]


def test_unlike_batches_do_not_compare():
    assert table(trained("single", 1, 3.0), trained("ddp", 2, 1.0, batch=24)) == []


def test_engines_are_strategies_of_their_own():
    rows = table(trained("ddp", 2, 1.0), trained("ddp", 2, 2.0, engine="deepspeed"))
    assert [row.strategy for row in rows] == ["ddp on 2", "deepspeed-ddp on 2"]


def row(name, n_ranks, step_s, n_repeats=9, **more):
    """A strategy whose repeats lie within a tenth of a per cent."""
    steps = tuple(step_s * (1 + 1e-4 * k) for k in range(n_repeats))
    return StrategyRow(
        workload="lenet fp32 batch 12", name=name, n_ranks=n_ranks, n_started=n_repeats,
        failures=(), step_s=steps, throughput=12 / step_s, **more,
    )  # fmt: skip


def failed(name, n_ranks, *failures):
    return replace(
        row(name, n_ranks, 1.0, 0), n_started=len(failures), failures=failures, throughput=None
    )


def finding(*rows):
    """The sentence, after comparing every row with the first that has steps."""
    baseline = next((one for one in rows if one.step_s), None)
    compared = [
        one
        if one is baseline or baseline is None or not one.step_s
        else replace(
            one,
            against=baseline.strategy,
            speedup=baseline.step_s[0] / one.step_s[0],
            verdict=verdict(one.step_s, baseline.step_s),
        )
        for one in rows
    ]
    return strategy_finding(compared)


def test_a_decided_comparison_names_the_fastest_and_why_another_is_no_gain():
    ddp = row("ddp", 5, 4.0, exposed_share=0.75, sent_bytes=2.0**20)
    assert finding(row("single", 1, 2.0), ddp, row("searched", 5, 1.0)) == (
        "searched is fastest: 2.00 times one device; ddp is no gain (0.50 times): exposed "
        "communication is 75% of its step, in which the busiest interface sends 1 MiB."
    )


def test_communication_is_no_cause_where_the_rest_of_the_step_is_no_gain_either():
    ddp = row("ddp", 5, 4.0, exposed_share=0.25, sent_bytes=2.0**20)
    assert finding(row("single", 1, 2.0), ddp) == (
        "No strategy is faster than one device; ddp is no gain (0.50 times)."
    )


def test_too_few_repeats_are_no_verdict():
    rows = row("single", 1, 2.0, 2), row("ddp", 5, 4.0, 2), row("searched", 5, 1.0, 2)
    assert finding(*rows) == (
        "No verdict yet: searched was fastest (2.00 times one device, ranges apart), but 2 repeats "
        "do not decide it (about 5 more would); ddp is undecided (0.50 times, ranges apart)."
    )
    assert finding(row("single", 1, 1.0, 1), row("ddp", 5, 4.0, 1)) == (
        "No verdict yet: one device was fastest, but 1 repeat does not decide it (about 6 "
        "more would); ddp is undecided (0.25 times)."
    )


def test_a_small_speed_up_has_two_digits():
    assert finding(row("single", 1, 0.17), row("ddp", 3, 5.7)) == (
        "No strategy is faster than one device; ddp is no gain (0.03 times)."
    )
    assert finding(row("single", 1, 0.172), row("ddp", 3, 5.0)).endswith("(0.034 times).")


def test_repeats_that_vary_more_than_strategies_differ_are_no_verdict():
    single, ddp = (
        replace(row(n, k, 1.0), step_s=(1.0, 2.0)) for n, k in (("single", 1), ("ddp", 2))
    )
    ddp = replace(ddp, step_s=(0.99, 2.0))
    assert finding(single, ddp) == (
        "No verdict: ddp was fastest (1.01 times one device), but the repeats vary too much to "
        "decide it."
    )


def test_strategies_that_the_repeats_do_not_separate_are_fastest_together():
    near = row("pipeline", 5, 1.01), row("searched", 5, 1.0), row("tensor", 5, 1.02)
    assert finding(row("single", 1, 2.0), *near) == (
        "searched (2.00 times one device), pipeline (1.98 times) and tensor (1.96 times) are "
        "fastest: their repeats do not separate them."
    )


def test_a_strategy_slower_than_the_baseline_is_not_among_the_fastest():
    single, pipeline = row("single", 1, 1.5), row("pipeline", 5, 1.6)
    # One of seven repeats is as fast as the slowest of `searched`, so that no verdict parts them.
    wide = replace(pipeline, step_s=(*pipeline.step_s[:-2], 0.9, 0.95))
    assert finding(single, wide, row("searched", 5, 1.0)) == (
        "searched is fastest: 1.50 times one device; pipeline is undecided (0.94 times)."
    )


def test_an_effect_below_a_tenth_is_no_gain():
    assert finding(row("single", 1, 1.05), row("ddp", 2, 1.0)) == (
        "ddp was fastest and is no gain: 1.05 times one device, within 10%."
    )


def test_one_strategy_is_compared_with_nothing():
    assert finding(row("ddp", 2, 1.0)) == (
        "Only ddp was trained (12 samples/s): there is nothing to compare it with."
    )
    assert finding(row("ddp", 2, 1.0), failed("tensor", 2, "oom", "crash", "oom")) == (
        "Only ddp has a result (12 samples/s): there is nothing to compare it with; "
        "tensor failed (out of memory, crashed)."
    )


def test_where_all_failed_there_is_no_result():
    assert finding(failed("ddp", 2, "timeout"), failed("single", 1)) == (
        "No strategy has a result: ddp failed (timed out); one device failed (no step was timed)."
    )
    assert finding(failed("ddp", 2, "running"), failed("single", 1, "crash", "running")) == (
        "No strategy has a result: ddp is not finished; one device failed (crashed, not finished)."
    )


def test_equal_names_are_told_apart_by_their_ranks_and_many_are_counted():
    slow = [row("ddp", n, 2.0 + n) for n in (2, 3, 4, 5)]
    assert finding(row("ddp", 1, 1.0), *slow) == (
        "No strategy is faster than ddp on 1; ddp on 5 is no gain (0.14 times); "
        "ddp on 4 is no gain (0.17 times); 2 more no faster or undecided."
    )


def searched_plan(plan, used, step_s):
    """A searched run on three ranks, of which some compute."""
    run = trained("searched", 3, step_s, engine="executor")
    for rank in used:
        work = [Span(kind="forward", start_s=10.0 * k, duration_s=0.1, step=k) for k in range(3)]
        run = replace(run, ranks={**run.ranks, rank: [*run.ranks[rank], *work]})
    header = msgspec.structs.replace(run.header, summary={"strategy": plan})
    return replace(run, header=header)


def test_a_search_that_chose_one_device_is_not_compared_with_it():
    runs = trained("single", 1, 3.0), searched_plan("single device", [0], 2.9)
    assert training_summary(runs[1]).throughput_per_device == pytest.approx(12 / 2.9)
    rows = table(*runs)
    assert (rows[1].plan, rows[1].verdict, rows[1].speedup) == (
        "single device", None, pytest.approx(3.0 / 2.9),
    )  # fmt: skip
    assert strategy_finding(rows) == (
        "Only one device was trained (4 samples/s): there is nothing to compare it with; "
        "searched chose one device, too."
    )


def test_a_search_that_chose_other_devices_is_compared():
    single = trained("single", 1, 3.0)
    for plan, used in (("single device", [2]), ("2 stages on 1-1 devices, whole", [0, 1])):
        row = table(single, searched_plan(plan, used, 2.9))[1]
        assert row.verdict.outcome == "inconclusive"
        summary = training_summary(searched_plan(plan, used, 2.9))
        assert summary.throughput_per_device == pytest.approx(12 / 2.9 / len(used))


def test_a_run_that_changes_is_compared_by_its_mean_step_with_the_time_standing_still():
    plain = trained("pipeline", 2, 1.0, freeze="none", shrink="none", cache="off", change=[])
    changed = trained("pipeline", 2, 0.5, freeze="schedule", shrink="search", cache="auto")
    change = Sample(metric="change_s", value=0.9, step=1, labels=_CHANGE)
    changed.ranks[0].append(change)
    _, row = table(plain, changed)
    assert row.strategy == "pipeline-freeze-shrink-cache-auto on 2"
    assert row.step_s == pytest.approx((0.8,))
    assert row.speedup == pytest.approx(1 / 0.8)
    summary = training_summary(changed)
    assert (summary.warnings, summary.outlier_steps) == ((), ())
    planned = as_planned(changed)
    assert {r.step for records in planned.ranks.values() for r in records} == {0}
    assert as_planned(plain) is plain


def test_a_run_that_changes_to_a_strategy_of_one_rank_has_no_straggler():
    changed = trained("ddp", 2, 1.0)
    work, idle = (
        [Span(kind="forward", start_s=10.0 * k, duration_s=s, step=k) for k in range(3)]
        for s in (0.9, 0.1)
    )
    run = replace(changed, ranks={0: [*changed.ranks[0], *work], 1: [*changed.ranks[1], *idle]})
    assert [rank.is_straggler for rank in training_summary(run).ranks] == [True, False]
    run.ranks[0].append(Sample(metric="change_s", value=0.9, step=1, labels=_CHANGE))
    assert not any(rank.is_straggler for rank in training_summary(run).ranks)


_CHANGE = {
    "change": 0, "before": "pipeline", "after": "pipeline, 1 layer frozen",
    "why": "--freeze schedule",
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["pipeline", "dp=1,pp=2"])
def test_pipelines_and_degrees_are_named_after_their_flow(strategy):
    run = trained(strategy, 2, 1.0, engine="executor", schedule="gpipe", microbatches=4)
    _, row = table(trained("single", 1, 1.0), run)
    assert row.strategy == f"{strategy}-gpipe-4-microbatches on 2"


def test_runs_that_round_summed_gradients_are_named_after_it_and_compared():
    runs = [trained("ddp", 2, 1.0), trained("ddp", 2, 0.6, reduce_dtype="bf16")]
    rows = table(*runs)
    assert [row.strategy for row in rows] == ["ddp on 2", "ddp-reduced-bf16 on 2"]
    assert rows[0].workload == rows[1].workload


def test_a_run_that_goes_on_is_named_after_its_first_step():
    one, two = (trained(*on, 1.0, first_step=559) for on in (("single", 1), ("ddp", 2)))
    _, row = table(one, two)
    assert row.strategy == "ddp-from-step-559 on 2"

"""The last table of training: measured beside predicted, over repeats."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from made_runs import local_header

from harness.domain.record import Sample, Span
from harness.measure.derive.training import training_summary
from harness.measure.store import Run
from harness.workloads.train.table import compared_text, train_text


def passes(step, stage, start_s):
    """A step of 4 s: a stage's forward and backward of 1 s each, idle otherwise."""
    first, fields = 4.0 * step + start_s, {"stage": stage, "microbatch": 0, "step": step}
    return [
        Span(kind="step", start_s=4.0 * step, duration_s=4.0, step=step),
        Span(kind="forward", start_s=first, duration_s=1.0, **fields),
        Span(kind="backward", start_s=first + 1, duration_s=1.0, **fields),
    ]


def make_run(strategy, repeat, *, n_ranks=2, step_s=4.0, **config):
    """Ten equal steps, 8 samples each, and 1 GiB of memory."""
    header = local_header(
        [f"node{i}" for i in range(n_ranks)],
        run_id=f"{strategy}{repeat}",
        key=strategy,
        repeat=repeat,
        workload="train",
        config={"model": "m", "strategy": strategy, "dtype": "fp32", "batch": 8,
                "engine": "executor" if strategy == "pipeline" else "torch", **config},
        summary={"predicted_step_s": 1.1 * step_s, "n_stages": 2},
    )  # fmt: skip
    ranks = {}
    for rank in range(n_ranks):
        spans = [
            msgspec.structs.replace(
                span, start_s=span.start_s * step_s / 4, duration_s=span.duration_s * step_s / 4
            )
            for step in range(10)
            for span in passes(step, rank if strategy == "pipeline" else 0, float(rank))
        ]
        samples = [Sample(metric="n_samples", value=8 / n_ranks, step=k) for k in range(10)]
        peak = Sample(metric="memory_peak_bytes", value=1 << 30, labels={"kind": "rss"})
        ranks[rank] = [*spans, *samples, peak]
    return Run(path=Path(header.run_id), header=header, ranks=ranks)


def cells_of(line):
    """Columns are two spaces apart at least."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def rows(runs):
    text = compared_text(runs, [training_summary(run) for run in runs])
    return list(map(cells_of, text.splitlines()))


def test_verdicts_of_a_sweep_name_what_they_compare():
    runs = [
        make_run(name, batch, n_ranks=n, step_s=8.0 / n, batch=batch)
        for name, n in (("single", 1), ("ddp", 2))
        for batch in (8, 16)
    ]
    text = compared_text(runs, [training_summary(run) for run in runs])
    verdicts = [line.partition(" on 1: ")[0] for line in text.splitlines() if "against" in line]
    assert verdicts == [f"m fp32 batch {n}: ddp on 2 against single" for n in (8, 16)]


def test_a_strategy_alone_has_its_row():
    heads, row = rows([make_run("pipeline", 0)])
    assert dict(zip(heads, row, strict=True)) == {
        "strategies of m fp32 batch 8": "pipeline on 2",
        "repeats": "1",
        "samples/s": "2",
        "step": "4 s",
        "99% interval": "4 s to 4 s",
        "bubble": "50%",
        "memory": "1 GiB",
        "predicted": "4.4 s",
        "error": "+10%",
    }


def test_the_bubble_is_that_of_the_first_strategy():
    run = make_run("pipeline", 0)
    names = {"change": 0, "before": "pipeline", "after": "other", "why": "by hand"}
    run.ranks[0].append(Sample(metric="change_s", value=1.0, step=4, labels=names))
    for rank, records in run.ranks.items():  # whose backward is another's afterwards
        run.ranks[rank] = [
            record
            for record in records
            if isinstance(record, Sample) or record.kind != "backward" or (record.step or 0) < 4
        ]
    heads, row = rows([run])[:2]
    assert dict(zip(heads, row, strict=True))["bubble"] == "50%"


def test_repeats_share_a_row_of_medians():
    steps = {"single": (4.0, 8.0), "ddp": (6.0,)}
    runs = [
        make_run(strategy, repeat, step_s=step_s)
        for strategy, durations in steps.items()
        for repeat, step_s in enumerate(durations)
    ]
    lines = train_text(runs).splitlines()
    shown = [line.split("  ")[0] for line in lines if " on 2" in line and " batch 8 on" in line]
    named = ["m single fp32 batch 8 on 2, 2 repeats", "m ddp fp32 batch 8 on 2 #0"]
    assert shown[:2] == named
    # Samples per second are those of the median step, as in the strategies' table.
    assert cells_of(lines[1])[1:5] == ["ok", "6 s", "4 s to 8 s (range)", "1.333"]
    assert set(shown) == set(named)


def test_the_accuracy_on_held_out_samples_after_the_last_epoch_is_shown():
    (run,) = runs = [make_run("single", 0)]
    assert train_text(runs).splitlines()[0].split()[-2:] == ["per", "device"]  # no loss either
    run.ranks[0] += [Sample(metric="accuracy", value=v, step=k) for k, v in enumerate((0.5, 0.75))]
    heads, cells = train_text(runs).splitlines()[:2]
    assert (heads.split()[-1], cells.split()[-1]) == ("accuracy", "75.0%")


def test_the_last_loss_of_a_run_that_was_lost_has_its_step():
    (run,) = runs = [make_run("single", 0)]
    run.ranks[0] += [Sample(metric="loss", value=2.5 - k, step=k) for k in range(2)]
    assert "2.5 to 1.5 at step 1" in train_text(runs).splitlines()[1]
    run.ranks[0] += [Sample(metric="loss", value=0.5, step=k) for k in range(2, 10)]
    assert train_text(runs).splitlines()[1].endswith("2.5 to 0.5")


def test_outliers_are_judged_over_the_steps_of_all_repeats():
    """Of a run whose steps all take 8 s none is far above the others; its repeats take 4 s."""
    runs = [make_run("single", r, step_s=s) for r, s in enumerate((4.0, 4.0, 4.0, 4.0, 8.0))]
    lines = [line for line in train_text(runs).splitlines() if "far above" in line]
    assert lines == ["warning: m single fp32 batch 8 on 2 #4: 10 steps far above the others"]


def test_parts_over_repeats_are_means_that_sum_to_the_mean_step_and_memory_is_the_peak():
    runs = [make_run("single", r, step_s=s) for r, s in enumerate((4.0, 4.0, 10.0))]
    peak = Sample(metric="memory_peak_bytes", value=3 << 30, labels={"kind": "rss"})
    runs[0].ranks[0].append(peak)
    lines = train_text(runs)
    assert lines.count("3 GiB") == 2
    heads, cells = map(cells_of, lines.split("mean step")[1].splitlines()[:2])
    # A step of 4 s, 4 s and 10 s is forward and backward of a quarter each.
    parts = dict(zip(heads, cells[1:], strict=True))
    assert (parts["forward"], parts["backward"], parts["other"]) == ("1.5 s", "1.5 s", "3 s")


def test_rates_over_repeats_are_of_the_median_step():
    runs = [make_run("single", r, step_s=s) for r, s in enumerate((4.0, 8.0))]
    for run in runs:
        for records in run.ranks.values():
            records.append(Sample(metric="model_flops", value=9e9))
    assert "  3 GFLOP/s" in train_text(runs)  # 18 GFLOP in 6 s, not the mean of two rates


@pytest.mark.parametrize("n_steps", [1, 8])
def test_differences_that_may_be_zero_are_within_noise(n_steps):
    (run,) = runs = [make_run("ddp", 0)]
    # Steps of 4 s with 2 s of computing; without communication 3 s, or 1 s to 5 s.
    without = {0: {"step": [3.0] * n_steps, "compute": [1.0, 2.5, *[1.5] * 6][-n_steps:]}, 1: {}}
    for rank, times in without.items():
        run.ranks[rank].append(Span(kind="communication", start_s=0.5, duration_s=0.2, step=0))
        run.ranks[rank] += [
            Sample(metric=f"no_sync_{name}_s", value=value, step=step)
            for name, values in times.items()
            for step, value in enumerate(values)
        ]
    heads, cells = map(cells_of, train_text(runs).split("\n\n")[2].splitlines())
    shown = dict(zip(heads, cells, strict=True))
    of_one = " (within noise)" if n_steps == 1 else ""  # which has no interval
    assert shown["step - no_sync"] == f"1 s{of_one}"
    assert shown["compute slowed"] == "500 ms (within noise)"


@pytest.mark.parametrize(
    ("strategy", "flags", "names"),
    [
        ("pipeline", {"microbatches": 8}, {"pipeline-8-microbatches on 2", "pipeline on 2"}),
        ("ddp", {"shard_state": "gradients"}, {"ddp-sharded-gradients on 2", "executor-ddp on 2"}),
    ],
)
def test_what_a_strategy_was_asked_for_is_a_row_of_its_own(strategy, flags, names):
    runs = [make_run(strategy, k, engine="executor", **more) for k, more in enumerate((flags, {}))]
    assert {row[0] for row in rows(runs)[1:3]} == names


def test_files_of_one_name_are_told_apart():
    files = ["results/a-search/strategy.json", "results/b-search/strategy.json", "plan.json"]
    runs = [make_run(file, 0, engine="executor") for file in files]
    runs += [make_run("plan.json", 1, engine="executor", strategy_digest="edited since")]
    names = [row[0] for row in rows(runs)[1:5]]
    edited = "plan on 2 · strategy_digest edited since"
    assert names == ["a-search on 2", "b-search on 2", edited, "plan on 2"]


def test_runs_that_differ_in_a_setting_alone_are_told_apart():
    runs = [
        msgspec.structs.replace(run.header, key=key, run_id=key)
        for key in ("equal", "speed")
        for run in [make_run("ddp", 0, balance=key)]
    ]
    found = train_text([replace(make_run("ddp", 0), header=header) for header in runs])
    names = {line.partition("  ")[0] for line in found.splitlines()}
    for key in ("equal", "speed"):
        assert {
            f"m ddp fp32 batch 8 on 2 · balance {key} #0",
            f"m fp32 batch 8 · balance {key}",
        } <= names


def test_staleness_is_said():
    *_, last = rows([make_run("pipeline", 0, asynchronous=True)])
    assert last[0].startswith("pipeline-asynchronous on 2 does not train like one device")
    assert "2 - 1 - s updates old" in last[0]


def test_losses_of_each_ranks_samples_are_said():
    run = make_run("ddp", 0)
    run.header.summary["has_local_loss"] = True
    *_, last = rows([run])
    assert last[0].startswith(
        "ddp on 2 does not train like one device: each rank computes the loss"
    )

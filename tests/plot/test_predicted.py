"""Figures of runs that were planned, predicted beside measured, and of pipelines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from matplotlib.figure import Figure as Canvas
from measured_runs import (
    catalog_of,
    copies,
    make_cluster,
    make_header,
    table_of,
    train_config,
    write_run,
    write_training,
)

from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.record import Sample
from harness.measure.derive.prediction import PARTS
from harness.measure.statistics import summarize
from harness.measure.store import read_header, write_header
from harness.plot.__main__ import main
from harness.plot.catalog import Catalog
from harness.plot.figures import load_figure
from harness.plot.headlines import answers, warnings
from harness.plot.predicted import competing, planned_cases
from harness.plot.render import image_bytes


@pytest.fixture(scope="module")
def catalog(planned):
    return catalog_of(planned)


def test_error_is_predicted_over_measured_for_every_run(catalog, planned):
    table = table_of("prediction", catalog)
    # The run that nobody predicted is absent, the one out of memory has no measured number.
    assert sorted(table["strategy"]) == ["ddp", "ddp", "pipeline", "searched", "single", "tensor"]
    row = table[table["strategy"] == "pipeline"].iloc[0]
    predicted_s = Prediction.load(planned / "pipeline-0" / PREDICTION_FILE).step_s
    # The median of nine steps of 1.1 x (1 to 1.008) predicted seconds, and a millisecond of data.
    measured_s = predicted_s * 1.1 * 1.004 + 1e-3
    assert row["predicted_s"] == predicted_s
    assert row["measured_s"] == pytest.approx(measured_s)
    assert row["error"] == pytest.approx(predicted_s / measured_s - 1)
    failed = table[table["status"] == "oom"].iloc[0]
    assert failed["predicted_s"] > 0
    assert pd.isna(failed["error"])


def test_one_device_alone_competes_with_the_cluster_it_is_the_first_of(catalog):
    (cell,) = competing(planned_cases(catalog)).values()
    assert sorted(case.training.first.strategy for case in cell) == [
        "ddp",
        "pipeline",
        "searched",
        "single",
        "tensor",  # out of memory
    ]


def test_a_cell_has_the_order_and_the_regret_of_its_predictions(catalog):
    figure = load_figure("prediction_choice")
    table = figure.table(catalog)
    assert list(table["predicted_s"]) == sorted(table["predicted_s"])
    assert table["strategy"].iloc[0] == "pipeline"
    assert list(table["n_repeats"][table["strategy"] == "ddp"]) == [2]
    (cell,) = figure.report_table(table).to_dict("records")
    assert (cell["n_strategies"], cell["n_failed"], cell["regret"]) == (4, 1, 0.0)
    assert cell["rank_correlation"] == pytest.approx(1.0)
    assert cell["median_error"] == pytest.approx(table["error"].abs().median())


def test_a_choice_that_failed_has_no_regret_and_keeps_its_row(planned, tmp_path):
    root = copies(planned, tmp_path / "results", "ddp-0", "searched-0", "tensor-0")
    path = root / "tensor-0" / PREDICTION_FILE
    path.write_bytes(msgspec.structs.replace(Prediction.load(path), step_s=1e-3).to_json())
    figure = load_figure("prediction_choice")
    table = figure.table(catalog_of(root))
    first = table.iloc[0]
    assert (first["strategy"], first["status"], first["is_chosen"]) == ("tensor", "oom", True)
    assert pd.isna(first["measured_s"])
    (cell,) = figure.report_table(table).to_dict("records")
    assert cell["regret"] == "predicted choice failed"
    assert cell["chosen"].startswith("tensor")
    text = _text(image_bytes(figure, table, "svg")[0])
    assert b"predicted choice failed" in text
    assert b"out of memory, predicted to be the fastest" in text


def test_a_repeat_that_failed_leaves_the_choice_to_the_others(planned, tmp_path):
    root = copies(planned, tmp_path / "results", "pipeline-0", "searched-0")
    _fail(shutil.copytree(planned / "pipeline-0", root / "pipeline-1"), "pipeline-1")
    table = table_of("prediction_choice", root)
    assert sorted(table["status"]) == ["crash", "ok", "ok"]
    assert set(table["regret"]) == {0.0}
    assert set(table["n_failed"]) == {0}


@pytest.mark.parametrize("name", ["pipeline_bubble", "stage_times", "timeline"])
def test_a_pipeline_that_failed_is_noted_below_the_others(name, planned, tmp_path):
    root = copies(planned, tmp_path / "results", "searched-0", "pipeline-0")
    _fail(root / "pipeline-0", "pipeline-0")
    figure = load_figure(name)
    table = figure.table(catalog_of(root))
    assert list(table["strategy" if "strategy" in table else "label"][table["status"] == "crash"])
    assert b"crashed (rank 3 is gone)" in _text(image_bytes(figure, table, "svg")[0])


def _fail(run_dir, run_id):
    """Let a run have crashed, with nothing recorded."""
    header = read_header(run_dir)
    more = {"run_id": run_id, "status": "crash", "reason": "rank 3 is gone"}
    write_header(run_dir, msgspec.structs.replace(header, **more))
    for path in run_dir.glob("rank*.jsonl"):
        path.unlink()


def test_differences_of_the_parts_sum_to_the_error(catalog):
    table = table_of("prediction_error", catalog)
    ok = table[table["status"] == "ok"]
    parts = ok[[f"difference_{part}_s" for part in PARTS]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(ok["difference_s"].to_numpy())
    measured = ok[[f"measured_{part}_s" for part in PARTS]].sum(axis=1)
    assert measured.to_numpy() == pytest.approx(ok["measured_s"].to_numpy())
    single = ok[ok["strategy"] == "single"].iloc[0]
    assert single["measured_rest_s"] == pytest.approx(1e-3)  # loading data
    assert single["difference_exposed_communication_s"] == pytest.approx(0)


def test_parts_of_runs_without_steps_without_communication_are_drawn(planned, tmp_path):
    root = copies(planned, tmp_path / "results", "searched-0", "pipeline-0")
    figure = load_figure("prediction_error")
    table = figure.table(catalog_of(root))
    assert table["difference_contention_s"].isna().all()
    assert b"pipeline" in _text(image_bytes(figure, table, "svg")[0])


def test_timeline_puts_ranks_on_one_clock_and_states_its_error(catalog):
    table = table_of("timeline", catalog)
    measured = table[(table["side"] == "measured") & table["label"].str.contains("pipeline")]
    assert measured["start_s"].min() == pytest.approx(0)
    # Clocks stand 1000 s apart; after alignment the step fits into itself.
    assert (measured["start_s"] + measured["duration_s"]).max() < 0.1
    assert set(measured["clock_error_s"]) == {4e-4}  # of rank 4, the worst
    assert set(measured["step"]) == {1.0}  # durations grow by 4 per mille, modulo 9
    predicted = table[(table["side"] == "predicted") & table["label"].str.contains("pipeline")]
    assert sorted(set(predicted["rank"])) == [0, 1, 2, 3, 4]


def test_the_note_of_a_cut_timeline_stands_clear_of_its_legend(catalog):
    canvas = Canvas(layout="constrained")
    replace(load_figure("timeline"), most=1).draw_most(table_of("timeline", catalog), canvas)
    (legend,) = canvas.legends
    canvas.draw_without_rendering()
    note, *words = [legend.get_title(), *legend.get_texts()]
    assert note.get_text().startswith("1 of ")
    assert not canvas.get_suptitle()
    for text in words:
        assert note.get_window_extent().y0 >= text.get_window_extent().y1


def test_bubble_stands_beside_that_of_the_simulation(catalog):
    table = table_of("pipeline_bubble", catalog)
    means = table[table["rank"].isna()]
    assert sorted(means["strategy"]) == ["pipeline", "searched"]
    pipeline = means[means["strategy"] == "pipeline"].iloc[0]
    ranks = table[(table["strategy"] == "pipeline") & table["rank"].notna()]
    assert list(ranks["rank"]) == [0, 1, 2, 3, 4]
    assert pipeline["bubble"] == pytest.approx(ranks["bubble"].mean())
    # All tasks are equally stretched, so that only the millisecond of data makes a difference.
    assert 0 < pipeline["bubble"] - pipeline["predicted_bubble"] < 0.02


def test_dots_of_a_bubble_are_medians_over_repeats_as_its_bar_is(catalog):
    (run,) = (one for one in catalog.runs if one.path.name == "pipeline-0")
    shares = (0.1, 0.2, 0.9)
    repeats = [
        replace(run, pipeline=replace(run.pipeline, bubble=summarize([s]), bubble_by_rank={0: s}))
        for s in shares
    ]
    assert list(table_of("pipeline_bubble", Catalog(repeats))["bubble"]) == [0.2, 0.2]


def test_stage_times_are_stretched_as_the_tasks_are(catalog):
    table = table_of("stage_times", catalog)
    searched = table[table["strategy"] == "searched"]
    assert list(searched["ranks"]) == ["0-1", "2-3", "4"]
    ratios = searched["total_s"] / searched["predicted_total_s"]
    assert ratios.to_numpy() == pytest.approx([1.3 * 1.004] * 3)
    assert list(searched["stage"][searched["is_slowest"]]) == [2]
    # Of the last stage backward comes next, so that it need not run forward again.
    assert list(searched["recompute_s"] > 0) == [True, True, False]


def test_predicted_memory_stands_beside_the_measured_peak(catalog, planned):
    table = table_of("memory", catalog)
    row = table[(table["strategy"] == "ddp") & (table["kind"] == "predicted")].iloc[0]
    prediction = Prediction.load(planned / "ddp-0" / PREDICTION_FILE)
    assert row["peak_bytes"] == max(prediction.memory_bytes.values())


def test_a_malformed_prediction_is_named_once_and_leaves_the_rest(planned, tmp_path, capsys):
    root = tmp_path / "results"
    shutil.copytree(planned, root)
    broken = root / "pipeline-0" / PREDICTION_FILE
    broken.write_text('{"strategy": "pipeline", "step_s": "soon"}')
    (root / "searched-0" / STRATEGY_FILE).write_text("{}")
    assert main([str(root), "--output", str(tmp_path / "plots"), "--only", "prediction"]) == 0
    error = capsys.readouterr().err
    assert error.count(f"skipped {broken}") == 1
    assert error.count(f"skipped {root / 'searched-0' / STRATEGY_FILE}") == 1
    report = (tmp_path / "plots" / "report.html").read_text()
    assert "Files and lines that could not be used (2)" in report.partition("</header>")[0]
    assert "pipeline-0/prediction.json" in report
    table = table_of("prediction", root)
    assert "pipeline" not in set(table["strategy"])


def test_a_clock_that_was_not_measured_is_said(tmp_path, planned):
    root = copies(planned, tmp_path / "results", "pipeline-0")
    records = root / "pipeline-0" / "rank3.jsonl"
    lines = [line for line in records.read_text().splitlines() if "clock_offset" not in line]
    records.write_text("\n".join(lines) + "\n")
    figure = load_figure("timeline")
    table = figure.table(catalog_of(root))
    measured = table[table["side"] == "measured"]
    assert measured["clock_error_s"].isna().all()
    assert (measured.groupby("rank")["start_s"].min() == 0).all()
    assert b"clocks not measured" in _text(image_bytes(figure, table, "svg")[0])


def _text(svg):
    """Comments of an SVG of matplotlib: the texts that it draws as outlines."""
    return b"\n".join(part.partition(b"-->")[0] for part in svg.split(b"<!--")[1:])


def strategies(answer):
    return [row.strategy for _, row in answer.rows]


def test_strategies_of_unlike_clusters_are_not_one_comparison(tmp_path):
    """One device alone is the baseline on both networks."""
    alone = train_config("single", 32)
    write_training(tmp_path, "single", alone, make_cluster(1, None), 0.2, 0.0)
    for name, nic, exposed_s in (("slow", 1.25e7, 0.3), ("fast", 1.25e8, 0.1)):
        config = train_config("ddp", 32)
        write_training(tmp_path, name, config, make_cluster(2, nic), 0.1, exposed_s)
    found = answers(catalog_of(tmp_path))
    assert [strategies(answer) for answer in found] == [["single on 1", "ddp on 2"]] * 2
    assert len({answer.cell for answer in found}) == 2
    faster, slower = sorted(answer.rows[1][1].median_s or 0.0 for answer in found)
    assert slower - faster > 0.19
    assert all(answer.rows[1][1].against == "single on 1" for answer in found)


def test_a_baseline_of_other_environment_variables_does_not_compare(tmp_path):
    for name, step_s in (("slow", 0.2), ("fast", 0.1)):
        for strategy, n in (("single", 1), ("ddp", 2)):
            write_training(
                tmp_path, f"{name}-{strategy}", train_config(strategy, 32), make_cluster(n),
                step_s / n, 0.0, settings={"MALLOC_ARENA_MAX": name, "kernel": strategy},
            )  # fmt: skip
    found = answers(catalog_of(tmp_path))
    assert [strategies(answer) for answer in found] == [["single on 1", "ddp on 2"]] * 2
    slow, fast = sorted((answer.rows[0][1] for answer in found), key=lambda row: -row.step_s[0])
    assert slow.step_s == pytest.approx([0.207], rel=0.02)
    assert fast.step_s == pytest.approx([0.107], rel=0.02)


def test_without_two_strategies_of_one_cell_there_is_no_comparison(tmp_path):
    write_run(tmp_path, make_header("links", {}, make_cluster(3), run_id="links"), {})
    (none,) = answers(catalog_of(tmp_path))
    assert none.sentence == ("No strategies to compare: there is no training run in these results.")
    assert none.rows == ()
    for batch, sentence in (
        (32, "Only ddp was trained ("),
        (64, "No strategies to compare: each of 2 cells was trained by one strategy."),
    ):
        write_training(tmp_path, f"ddp-{batch}", train_config("ddp", batch), make_cluster(2))
        (answer,) = answers(catalog_of(tmp_path))
        assert answer.sentence.startswith(sentence)
    assert strategies(answer) == ["ddp on 2", "ddp on 2"]
    assert [cell.split(" · ")[1] for cell, _ in answer.rows] == ["batch 32", "batch 64"]


def test_a_strategy_that_does_not_train_like_one_device_is_named_with_the_reason(tmp_path):
    for name, flags in (
        ("same", {}),
        ("averaged", {"sync_every": 8}),
        ("frozen", {"freeze": "schedule"}),
    ):
        write_training(tmp_path, name, train_config("ddp", 32, **flags), make_cluster(2))
    found = warnings(catalog_of(tmp_path))["Not the training of one device"]
    assert [line.partition(": ")[2] for line in sorted(found)] == [
        "it freezes layers", "it averages replicas of the parameters, not gradients"
    ]  # fmt: skip
    assert all("ddp-" in line for line in found)


def test_warnings_are_of_every_workload_and_folded_by_kind(tmp_path):
    left_out = {"left_out": ["send_recv: one rank has nobody to send to"]}
    links = make_header("links", {}, make_cluster(3), run_id="links", summary=left_out)
    write_run(tmp_path, links, {})
    labels = {"m": 8, "n": 8, "k": 8, "dtype": "bf16", "reason": "no kernel"}
    skipped = {0: [Sample(metric="matmul_skipped", value=1, labels=labels)]}
    write_run(tmp_path, make_header("matmul", {}, make_cluster(3), run_id="matmul"), skipped)
    for repeat in range(5):
        versions = {"torch": "2.13.0" if repeat else "2.12.0"}
        config, name = train_config("ddp", 32), f"ddp-{repeat}"
        write_training(tmp_path, name, config, make_cluster(2), repeat=repeat, versions=versions)
    named = ", ".join(f"resnet50 ddp on 2 (ddp-{repeat})" for repeat in range(3))
    found = warnings(catalog_of(tmp_path))
    assert list(found) == [
        "Samples are few or vary",
        "Outlier steps",
        "Measurements left out",
        "Versions or settings differ between runs",
    ]
    assert found["Outlier steps"] == [f"{named} and 2 more: 1 step far above the others"]
    assert found["Measurements left out"] == [
        "3 × RTX 3070, 1 Gbit/s · bf16 n = 8: ranks 0: no kernel",
        "links: send_recv: one rank has nobody to send to",
    ]
    assert found["Versions or settings differ between runs"] == [
        "runs disagree on the version of torch: 2.12.0, 2.13.0"
    ]


def test_the_answer_and_the_figure_have_the_same_throughput():
    """Of an even number of repeats, where the median of rates is not the rate of the median."""
    catalog = catalog_of(Path(__file__).parents[2] / "results")
    drawn = load_figure("throughput").table(catalog)
    by_strategy = dict(zip(drawn["strategy"], drawn["throughput_samples_per_s"], strict=True))
    (answer,) = answers(catalog)
    assert {len(row.step_s) for _, row in answer.rows} == {2}
    assert by_strategy == pytest.approx({row.name: row.throughput for _, row in answer.rows})

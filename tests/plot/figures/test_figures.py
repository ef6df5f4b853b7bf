"""Figures by their tables: what is drawn, what stays although it is not ok, what merges."""

import re

import made_runs
import msgspec
import pandas as pd
import pytest
from made_runs import cluster_of, local_header, read_results
from matplotlib.figure import Figure as Canvas
from measured_runs import (
    GPU,
    add_records,
    catalog_of,
    links_records,
    make_cluster,
    make_header,
    matmul_records,
    table_of,
    train_config,
    training_records,
    write_run,
    write_training,
)

from harness.domain.record import Sample, Span
from harness.measure.derive.doubts import DoubtKind
from harness.measure.derive.strategies import StrategyRow
from harness.measure.store import find_runs, without_samples
from harness.plot.figures import FIGURES, load_figure
from harness.plot.figures.memory import KINDS as MEMORY_KINDS
from harness.plot.figures.prediction import _name_misses
from harness.plot.headlines import answers, warnings
from harness.plot.predicted import cells
from harness.plot.render import image_bytes
from harness.plot.report import _strategy_row, format_value, header_of, present
from harness.plot.style import (
    STRATEGIES,
    draw_bar_panels,
    drawing_style,
    joint_legend,
    note_cut,
    short_hosts,
    wrap_label,
)


@pytest.fixture(scope="module")
def catalog(comparison):
    return catalog_of(comparison)


@pytest.fixture(scope="module")
def of_planned(planned):
    return catalog_of(planned)


def drawn(name, table):
    """The canvas of a figure, laid out."""
    canvas = Canvas(layout="constrained")
    load_figure(name).draw(table, canvas)
    canvas.draw_without_rendering()
    return canvas


def row_of(table, **values):
    """The only row with these values."""
    for column, value in values.items():
        table = table[table[column] == value]
    assert len(table) == 1, table
    return table.iloc[0]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_shows_and_what_is_better(name):
    figure = load_figure(name)
    assert figure.name == name
    assert figure.title == FIGURES[name]
    assert len(figure.caption) > 80
    assert "better" in figure.better


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_keeps_the_run_that_is_not_ok(name, catalog, of_planned):
    is_of_all = load_figure(name).needs.startswith("a training run")
    for runs, reason in ((catalog, "2.4 GiB"), (of_planned, "tried to allocate 9 GiB")):
        table = table_of(name, runs)
        if table.empty or not (is_of_all or (table["status"] == "oom").any()):
            continue
        failed = row_of(table, status="oom")
        assert reason in failed["reason"]
        numbers = [column for column in table.columns if column.endswith("_per_s")]
        assert failed[numbers].isna().all()


def test_a_run_that_is_not_ok_is_named_in_the_warnings(catalog):
    (line,) = warnings(catalog)["Runs that are not ok"]
    assert line.startswith("too-large: out of memory: ")


def test_rates_over_two_repeats_are_of_the_median_time(tmp_path):
    for name, slower in (("a", 1), ("b", 3)):
        runs = {workload: make_header(workload, {}, make_cluster(2), run_id=f"{workload}-{name}")
                for workload in ("links", "matmul")}  # fmt: skip
        write_run(tmp_path, runs["links"], links_records(2, 3e8 / slower))
        products = {
            rank: [
                msgspec.structs.replace(r, value=r.value * slower)
                if r.metric.startswith("summa")
                else r
                for r in records
            ]
            for rank, records in matmul_records(2).items()
        }
        write_run(tmp_path, runs["matmul"], products)
        write_training(tmp_path, name, train_config("ddp", 32), make_cluster(2), 0.1 * slower, 0.0)
    found = catalog_of(tmp_path)
    links = table_of("link_heatmap", found)
    assert list(links["bandwidth_bytes_per_s"]) == pytest.approx([0.75e8] * 2)
    product = table_of("summa", found).iloc[0]
    peak = sum(found.peaks["NVIDIA GeForce RTX 3070", 8, "fp32"] for _ in range(2))
    assert product["efficiency"] == pytest.approx(product["flops_per_s"] / peak)
    (rate,) = table_of("throughput", found).to_dict("records")
    flops_per_s = 2.5e10 * rate["throughput_samples_per_s"]
    assert rate["mfu"] == pytest.approx(flops_per_s / (2 * 2.03e13))
    assert rate["mfu_of_measured_peak"] == pytest.approx(flops_per_s / peak)
    (step,) = table_of("step_breakdown", found).to_dict("records")
    n_steps_per_s = rate["throughput_samples_per_s"] / 32
    assert step["synchronisations_per_s"] == pytest.approx(5 * n_steps_per_s)


def test_samples_per_second_of_unlike_batches_are_those_of_the_training_table(tmp_path):
    path = write_training(tmp_path, "a", train_config("ddp", 32), make_cluster(2), 0.1, 0.0)
    # Sums with the samples that are written already.
    add_records(path, [Sample(metric="n_samples", value=32 * at, step=at) for at in range(40)])
    found = catalog_of(tmp_path)
    (row,) = table_of("throughput", found).to_dict("records")
    (case,) = found.training
    assert row["throughput_samples_per_s"] == pytest.approx(case.first.throughput)
    assert case.first.throughput == case.first.n_samples / case.first.duration.median
    assert case.first.duration.n == 1  # a step alone has the largest batch


@pytest.mark.parametrize(
    ("more", "n_repeats", "n_labels"), [({"time_budget_s": 0.3}, 2, 1), ({"in_turn": True}, 1, 2)]
)
def test_matmul_runs_of_other_lengths_are_repeats(tmp_path, more, n_repeats, n_labels):
    for name, config in (("a", {"time_budget_s": 0.6}), ("b", more)):
        header = make_header("matmul", config, make_cluster(3), run_id=name)
        write_run(tmp_path, header, matmul_records(3))
    catalog = catalog_of(tmp_path)
    for name in ("matmul", "memory_bandwidth", "summa"):
        table = table_of(name, catalog)
        assert set(table["n_repeats"]) == {n_repeats}
        clusters = "cluster" if name == "summa" else "label"
        assert table[clusters].nunique() == n_labels


def test_scaling_holds_the_batch_or_the_batch_per_device(catalog):
    table = table_of("scaling", catalog)
    strong = row_of(table, scaling="strong", strategy="ddp", n_devices=5)
    assert strong["efficiency"] == pytest.approx(0.107 / (5 * 0.117), rel=0.01)
    assert strong["low"] < strong["efficiency"] < strong["high"]
    weak = row_of(table, scaling="weak", strategy="ddp", n_devices=5)
    assert weak["efficiency"] == pytest.approx(0.107 / 0.197, rel=0.01)
    assert weak["speedup"] == pytest.approx(5 * weak["efficiency"])
    assert weak["baseline_devices"] == 1


def test_devices_that_a_plan_leaves_out_do_not_count(tmp_path):
    records = training_records(2, 32, 0.1, 0.0)
    records[1] = [one for one in records[1] if getattr(one, "kind", "step") == "step"]
    for strategy, n in (("single", 1), ("searched", 2)):
        run = make_header("train", train_config(strategy, 32), make_cluster(n), run_id=strategy)
        write_run(tmp_path, run, {rank: records[rank] for rank in range(n)})
    assert table_of("scaling", tmp_path).empty
    row = row_of(table_of("throughput", tmp_path), strategy="searched")
    assert row["per_device_samples_per_s"] == row["throughput_samples_per_s"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("network", ["about 0.1 Gbit/s", "about 1 Gbit/s"]),
        ("devices", ["1 × H200 + 2 × RTX 3070", " · RTX 3070"]),
        ("data", ["cifar10", "synthetic"]),
    ],
)
def test_scaling_keeps_unlike_clusters_and_data_apart(tmp_path, changed, told):
    three = make_cluster(3, 1.25e7 if changed == "network" else 1.25e8)
    if changed == "devices":
        three.nodes[2] = make_cluster(3, kind="NVIDIA H200").nodes[2]
    other = {"dataset": "cifar10"} if changed == "data" else {}
    for name, slower, on_three, more in (("a", 1, make_cluster(3), {}), ("b", 2, three, other)):
        for n, on in ((1, make_cluster(1)), (3, on_three)):
            config = train_config("single" if n == 1 else "ddp", 36, **more)
            write_training(tmp_path, f"{name}{n}", config, on, 0.1 * slower / n, 0.0)
    table = table_of("scaling", tmp_path)
    three_devices = table[table["n_devices"] == 3]
    assert len(set(three_devices["time_s"])) == len(three_devices) == 2
    labels = sorted(three_devices["label"])
    assert [words in label for words, label in zip(told, labels, strict=True)] == [True, True]


def test_outlier_steps_are_marked_in_every_repeat(catalog):
    table = table_of("step_time", catalog)
    far = table[table["is_outlier"].astype(bool)]
    assert set(far["step"]) == {20}
    assert len(far) == 8  # single, 2 x 3 ddp, pipeline
    digest = load_figure("step_time").report_table(table)
    assert pd.isna(row_of(digest, status="oom")["n_steps"])
    assert digest["n_outliers"].sum() == 8


def test_losses_stand_at_the_time_of_their_steps_and_held_out_ones_after_theirs(tmp_path):
    config = train_config("ddp", 32)
    path = write_training(tmp_path, "a", config, make_cluster(2), 0.1, 0.0)
    held_out = {19: 3.5, 39: 2.5}.items()
    add_records(path, [Sample(metric="validation_loss", value=x, step=k) for k, x in held_out])
    catalog = catalog_of(tmp_path)
    times = catalog.training[0].case.runs[0].times
    table = table_of("loss", catalog)
    trained = table[table["loss"].notna()]
    assert trained["loss"].tolist() == [7 - 0.01 * step for step in range(40)]
    assert row_of(trained, step=39)["time_s"] == pytest.approx(sum(times.values()))
    held_out = table[table["validation_loss"].notna()]
    assert held_out["step"].tolist() == [19, 39]
    assert held_out["time_s"].tolist() == trained["time_s"].iloc[[19, 39]].tolist()
    digest = load_figure("loss").report_table(table).iloc[0]
    assert (digest["first_loss"], digest["validation_loss"], digest["n_steps"]) == (7, 2.5, 40)


def test_runs_with_other_data_or_on_another_cluster_have_loss_lines_of_their_own(tmp_path):
    """A line through the points of two runs would go back in time."""
    other = {"dataset": "digits", "epochs": 2, "evaluate": False, "n_layers": None}
    write_training(tmp_path, "a", train_config("ddp", 32), make_cluster(2), 0.1, 0.0)
    write_training(tmp_path, "b", train_config("ddp", 32, **other), make_cluster(2), 0.1, 0.0)
    write_training(tmp_path, "c", train_config("ddp", 32), make_cluster(2, kind="A100"), 0.1, 0.0)
    table = table_of("loss", catalog_of(tmp_path))
    lines = table.groupby(["workload", "line"]).size()
    assert len(lines) == 3
    assert set(lines) == {40}
    workloads = {f"resnet50 · fp32 · batch 32 · dataset {name}" for name in ("synthetic", "digits")}
    assert set(table["workload"]) == workloads
    labels = set(table["label"])
    assert any(label.endswith("dataset digits · epochs 2") for label in labels)
    assert not any("None" in label or "False" in label for label in labels)


def test_a_failed_run_is_drawn_beside_the_run_of_its_case_that_is_ok(tmp_path):
    config = train_config("ddp", 32)
    for name, status in (("a", "ok"), ("b", "timeout"), ("c", "ok")):
        path = write_training(tmp_path, name, config, make_cluster(2), 0.1, 0.0, status=status)
        load = {"metric": "device_utilization_percent", "labels": {"device": "0"}}
        add_records(path, [Sample(value=ord(name), time_s=1e6, **load)])
    catalog = catalog_of(tmp_path)
    canvas = drawn("step_time", table_of("step_time", catalog))
    lines = [len(axes.lines) for axes in canvas.axes if axes.lines]
    assert lines == [4, 3]  # each of two repeats, then the failed run, with median and outliers
    assert canvas.axes[1].get_title().endswith("timed out")
    canvas = drawn("memory", table_of("memory", catalog))
    assert [text.get_text() for text in canvas.axes[0].texts if "✕" in text.get_text()]
    table = table_of("device_load", catalog)
    readings = table[table["time_s"] == 1e6].set_index("repeat")["value"]
    assert readings.to_dict() == {0: ord("a"), 1: ord("c"), 2: ord("b")}


def test_an_epoch_is_not_shown_as_a_step():
    row = StrategyRow(workload="m", name="s", n_ranks=1, n_started=1, failures=(), step_s=(90.0,),
                      throughput=1.0, unit="epoch")  # fmt: skip
    assert _strategy_row(row, "", "")["step"] == "90 s an epoch"
    assert format_value("other_s", 1e-17) == "0"


def test_a_run_that_goes_on_with_another_has_its_line_in_the_same_panel(tmp_path):
    first, then = train_config("ddp", 32), train_config("without-0", 32)
    then |= {"continues": "a", "load_state": "results/a/state", "asked_strategy": "ddp"}
    for name, config in (("a", first), ("b", then)):
        write_training(tmp_path, name, config, make_cluster(2), 0.1, 0.0)
    table = table_of("loss", catalog_of(tmp_path))
    assert set(table["workload"]) == {"resnet50 · fp32 · batch 32"}
    assert set(table["line"]) == {"ddp on 2", "without-0 on 2"}


def test_strategies_of_other_settings_are_in_cells_of_their_own(tmp_path):
    for n, layers in enumerate((2, 2, 12)):
        config = train_config(("ddp", "pipeline", "ddp")[n], 32, n_layers=layers)
        write_training(tmp_path, f"r{n}", config, make_cluster(2), 0.1, 0.0)
    write_training(tmp_path, "one", train_config("single", 32, n_layers=12), make_cluster(1))
    found = cells(catalog_of(tmp_path).training)
    names = {cell: sorted(case.first.strategy for case in own) for cell, own in found.items()}
    assert [one.cell for one in answers(catalog_of(tmp_path))] == list(names)  # 2 before 12
    cell = "resnet50 · batch 32 · fp32 · 2 × RTX 3070, 1 Gbit/s"
    assert names == {
        f"{cell} · n_layers 2": ["ddp", "pipeline"],
        f"{cell} · n_layers 12": ["ddp", "single"],
    }


def test_a_model_of_another_size_is_no_baseline_of_scaling(tmp_path):
    for n, layers in ((1, 2), (1, 12), (2, 12)):
        config = train_config("ddp", 32, n_layers=layers, steps=20 * n)
        write_training(tmp_path, f"{n}-{layers}", config, make_cluster(n), 0.01 * layers, 0.0)
    table = table_of("scaling", catalog_of(tmp_path))
    assert set(table["label"].str.contains("n_layers 12")) == {True}
    assert table["n_devices"].tolist() == [1, 2]


def test_each_problem_of_a_series_is_a_line_of_its_own(tmp_path):
    for n, batch in ((1, 32), (2, 32), (1, 256), (2, 256), (4, 256)):
        config = train_config("ddp", batch, steps=20 * n)
        write_training(tmp_path, f"{n}-{batch}", config, make_cluster(n), 0.1, 0.0)
    table = table_of("scaling", catalog_of(tmp_path))
    series = "ddp · resnet50 · fp32 · RTX 3070, by step"
    assert table.groupby("label", sort=False)["n_devices"].agg(list).to_dict() == {
        f"{series}, 32 samples": [1, 2],
        f"{series}, 256 samples": [1, 2, 4],
    }


def test_strategies_of_one_name_are_told_apart_on_a_scale(tmp_path):
    write_training(tmp_path, "one", train_config("single", 32), make_cluster(1))
    for stages in (2, 4):
        config = train_config("pipeline", 32, stages=stages)
        write_training(tmp_path, f"{stages}", config, make_cluster(4), 0.1, 0.0)
    found = catalog_of(tmp_path)
    (answer,) = answers(found)
    names = [f"pipeline on 4 · stages {n}" for n in (2, 4)]
    assert [row.strategy for _, row in answer.rows] == ["single on 1", *names]
    ends = table_of("scaling", found).loc[lambda rows: rows["n_devices"] == 4, "label"]
    assert [label.partition("stages")[2] for label in ends] == [" 2, by step", " 4, by step"]


def test_runs_under_other_environment_variables_are_series_of_their_own(tmp_path):
    for name, settings, n, compute_s in (
        *(("one", {}, 1, 0.3), ("none", {}, 2, 0.2)),
        *(("ring", {"NCCL_ALGO": "Ring"}, 2, 0.21), ("tree", {"NCCL_ALGO": "Tree"}, 2, 0.22)),
    ):
        header = make_header(
            "train", train_config("ddp", 32), make_cluster(n), settings, run_id=name
        )
        write_run(tmp_path, header, training_records(n, 32, compute_s, 0.0))
    table = table_of("scaling", catalog_of(tmp_path))
    labels = set(table[table["n_devices"] == 2]["label"])
    series = "ddp · resnet50 · fp32 · RTX 3070"
    assert labels == {f"{series}{more}, by step"
                      for more in ("", " · NCCL_ALGO=Ring", " · NCCL_ALGO=Tree")}  # fmt: skip


def test_two_devices_of_one_node_are_no_point_of_a_series_over_an_unknown_network(tmp_path):
    for hosts in (["a", "b"], ["a", "a"], ["a", "b", "c"]):
        config, cluster = train_config("ddp", 32), cluster_of(hosts, kind=GPU)
        header = make_header("train", config, cluster, run_id="".join(hosts))
        ranks = made_runs.header_of(hosts, cluster=cluster, info={"n_cores": 8}).ranks
        header = msgspec.structs.replace(header, ranks=ranks)
        write_run(tmp_path, header, training_records(len(hosts), 32, 0.1, 0.0))
    labels = set(table_of("scaling", catalog_of(tmp_path))["label"])
    assert labels == {"ddp · resnet50 · fp32 · RTX 3070 · unknown network, by step"}


def test_the_warnings_of_a_run_stand_in_one_line(tmp_path):
    write_training(tmp_path, "a", train_config("ddp", 32), make_cluster(2), 0.1, 0.0)
    more = [Span(kind="step", step=k, start_s=90.0 + k, duration_s=9.0) for k in (98, 99)]
    add_records(tmp_path / "a", more)
    (line,) = warnings(catalog_of(tmp_path))[DoubtKind.SPREAD]
    assert "; " in line


def test_the_words_about_steps_stand_above_all_points(catalog):
    for axes in drawn("step_time", table_of("step_time", catalog)).axes:
        points = [y for line in axes.lines for y in line.get_ydata()]
        for words in axes.texts:
            (_, bottom), _ = axes.transData.inverted().transform(words.get_window_extent())
            assert bottom > max(points), words.get_text()


def test_memory_is_the_highest_ranks(catalog):
    table = table_of("memory", catalog)
    row = row_of(table[table["strategy"] == "pipeline"], kind="allocated")
    assert row["peak_bytes"] == pytest.approx(3.5 * 2**30)
    assert (row["rank"], row["device_bytes"]) == (4, 8 * 2**30)


def test_bandwidth_carries_the_limit_of_the_link(catalog):
    table = table_of("bandwidth", catalog)
    assert set(table["nic_limit_bytes_per_s"]) == {1.25e8}
    links = table.groupby("transport")["best_link_bytes_per_s"].max()
    assert (links["nccl"], links.isna()["mpi"]) == (1.17e8, True)  # whose pairs are not measured
    row = row_of(table, operation="all_reduce", transport="nccl", size_bytes=2**24)
    assert row["busbw_bytes_per_s"] == 1.6 * row["algbw_bytes_per_s"]
    assert 0.9 * 1.17e8 < row["busbw_bytes_per_s"] < 1.17e8
    assert not table["is_above_link"].any()


def test_collectives_above_the_limit_of_the_link_are_marked(tmp_path):
    run = make_header("links", {}, make_cluster(5), run_id="links")
    write_run(tmp_path, run, links_records(bandwidth=2.5e8))  # the NIC has half of it
    table = table_of("bandwidth", catalog_of(tmp_path))
    fast = table["busbw_bytes_per_s"] > 1.25e8
    assert fast.any()
    assert (table["is_above_link"] == fast).all()


def test_heat_map_shows_the_slow_node_in_both_directions(catalog):
    table = table_of("link_heatmap", catalog)
    assert len(table) == 20
    slow = table[table["bandwidth_bytes_per_s"] < 1e8]
    assert len(slow) == 8
    ends = zip(slow["source_name"], slow["target_name"], strict=True)
    assert all("tesla4" in pair for pair in ends)


def test_heat_map_merges_messages_of_one_size_only(tmp_path):
    pair = {"source": 0, "target": 1, "transport": "nccl"}
    for name, n_bytes, time_s in (("a", 2**18, 1.0), ("b", 2**22, 2.0), ("c", 2**22, 4.0)):
        labels = pair | {"n_bytes": n_bytes}
        sent = Sample(metric="link_transfer_s", value=time_s, labels=labels)
        header = make_header("links", {}, make_cluster(2), run_id=name)
        write_run(tmp_path, header, {0: [sent], 1: []})
    (row,) = table_of("link_heatmap", tmp_path).to_dict("records")
    assert (row["message_bytes"], row["n_repeats"]) == (2**22, 2)
    assert row["bandwidth_bytes_per_s"] == 2**22 / 3
    assert (row["low_bytes_per_s"], row["high_bytes_per_s"]) == (2**20, 2**21)


def test_short_names_of_hosts_keep_what_tells_them_apart():
    hosts = [f"gpu-partition-node-{n}.cluster.example.org" for n in (1, 12)]
    assert short_hosts(hosts, 8) == ["…-node-1", "…node-12"]
    names = ["a.example.org:3", "10.0.0.1", "b"]
    assert short_hosts(names, 14) == ["a:3", "10.0.0.1", "b"]


def test_device_load_keeps_time_and_device(catalog):
    table = table_of("device_load", catalog)
    readings = table[table["metric"] == "device_temperature_c"]
    assert len(readings) == 20 * (1 + 5 * 7)
    assert readings["time_s"].max() == 19.0
    figure = load_figure("device_load")
    assert figure.needs.startswith("training runs")  # those on CPUs, too
    digest = figure.report_table(table)
    row = row_of(digest, label="resnet50 · single · batch 32 · fp32 · 1 × RTX 3070")
    assert row["max_device_temperature_c"] == 55 + 19 / 4
    assert 70 < row["median_device_utilization_percent"] < 90


def test_an_invalid_run_is_never_a_number(tmp_path):
    for status in ("invalid", "crash", "timeout", "running"):
        write_training(tmp_path, status, train_config("ddp", 32), make_cluster(2), status=status)
    made = catalog_of(tmp_path)
    table = table_of("throughput", made)
    assert sorted(table["status"]) == ["crash", "invalid", "running", "timeout"]
    assert table["throughput_samples_per_s"].isna().all()
    assert image_bytes(load_figure("throughput"), table, "svg")
    steps = table_of("step_time", made)
    assert steps[steps["status"] == "invalid"]["duration_s"].isna().all()


def test_runs_of_unlike_clusters_do_not_merge(tmp_path):
    for name, nic in (("slow", 1.25e7), ("fast", 1.25e8), ("fast-again", 1.25e8)):
        write_training(tmp_path, name, train_config("ddp", 32), make_cluster(2, nic))
    table = table_of("throughput", tmp_path)
    assert sorted(table["n_repeats"]) == [1, 2]
    assert len(set(table["cluster"])) == 2


def test_nodes_that_tell_clusters_apart_are_whole_in_a_figures_label(tmp_path):
    three = make_cluster(3)
    for name, others in (("near", [1]), ("far", [2])):
        nodes = [three.nodes[k] for k in (0, *others)]
        on = msgspec.structs.replace(three, nodes=nodes, links=[])
        write_training(tmp_path, name, train_config("ddp", 32), on)
    table = table_of("throughput", tmp_path)
    last = sorted(wrap_label(label, 30).splitlines()[-1] for label in table["label"])
    assert last == ["tesla0 … tesla1", "tesla0 … tesla2"]


def test_the_speed_of_a_network_is_whole_in_the_label_of_many_unlike_devices():
    cluster = "2 × AMD EPYC x 0.3 + 1 × AMD EPYC x 0.6, 0.1 Gbit/s"
    assert wrap_label(f"searched · batch 24 · fp32 · {cluster}").splitlines() == [
        "searched · batch 24 · fp32",
        "2 × AMD EPYC x 0.3 + 1 × AMD EPYC x 0.6",
        "0.1 Gbit/s",
    ]


def test_no_kind_of_memory_has_the_colour_of_a_strategy():
    assert not {colour for colour, _ in MEMORY_KINDS.values()} & set(STRATEGIES.values())


def test_runs_with_other_environment_variables_do_not_merge_and_say_them(tmp_path):
    always = {"kernel": "6.1", "GLOO_SOCKET_IFNAME": "eth0"}
    ring, tree = always | {"NCCL_ALGO": "Ring"}, always | {"NCCL_ALGO": "Tree"}
    of_runs = [{}, always, always | {"kernel": "6.5"}, ring, ring, tree]  # {}: not known
    for k, found in enumerate(of_runs):
        config = train_config("ddp", 32)
        write_training(tmp_path, f"run{k}", config, make_cluster(2), settings=found)
    catalog = catalog_of(tmp_path)
    table = table_of("throughput", catalog)
    pairs = zip(table["label"], table["n_repeats"], strict=True)
    assert {label.split(", ", 2)[-1]: n for label, n in pairs} == {
        "1 Gbit/s": 3, "NCCL_ALGO=Ring": 2, "NCCL_ALGO=Tree": 1,
    }  # fmt: skip
    assert warnings(catalog)["Versions or settings differ between runs"] == [
        "runs disagree on the version of kernel: 6.1 (tesla0, tesla1); 6.5 (tesla0, tesla1)"
    ]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("step_breakdown", 12.3), ("step_time", 12.3), ("stage_times", 1.2), ("memory", 2e12),
        ("matmul", 2e15), ("summa", 2e15), ("memory_bandwidth", 2e13),
    ],
)  # fmt: skip
def test_large_numbers_are_drawn_without_exponents(name, unit, catalog, of_planned):
    table = table_of(name, of_planned if table_of(name, catalog).empty else catalog)
    amounts = [c for c in table.columns if c.endswith(("_s", "_bytes")) and c != "array_bytes"]
    table[amounts] *= unit / table[amounts].max().max()
    canvas = drawn(name, table)
    texts = [text.get_text() for axes in canvas.axes for text in axes.texts]
    assert any(char.isdigit() for char in "".join(texts))
    assert not [text for text in texts if re.search(r"\de\+", text)]


def test_a_label_has_the_speed_of_fast_links_without_exponent(tmp_path):
    for n in (2, 3):
        write_training(tmp_path, str(n), train_config("ddp", 32), make_cluster(n, 1.25e10))
    catalog = catalog_of(tmp_path)
    assert {case.case.cluster.split(", ")[1] for case in catalog.training} == {"100 Gbit/s"}


def test_links_of_two_speeds_do_not_merge_even_when_no_header_tells(tmp_path):
    for name, bandwidth in (("slow", 1.18e7), ("fast", 1.17e8), ("fast-again", 1.02e8)):
        run = make_header("links", {}, make_cluster(3, None), run_id=name)
        write_run(tmp_path, run, links_records(3, bandwidth))
    table = table_of("bandwidth", tmp_path)
    rows = table[(table["operation"] == "broadcast") & (table["size_bytes"] == 2**24)]
    assert sorted(rows["n_repeats"]) == [1, 1, 2, 2]  # two transports of two clusters
    assert {label.split(", ")[1] for label in rows["cluster"]} == {"0.094 Gbit/s", "0.94 Gbit/s"}


def test_measured_links_do_not_divide_the_runs_of_one_node(tmp_path):
    run = local_header(["one", "one"], workload="links", run_id="links")
    write_run(tmp_path, run, links_records(2))
    config = train_config("ddp", 32)
    run = local_header(["one", "one"], workload="train", run_id="train", config=config)
    write_run(tmp_path, run, training_records(2, 32, 0.1, 0.1))
    (label,) = table_of("throughput", tmp_path)["label"]
    assert label.endswith("2 × test device")


def test_samples_are_drawn_until_there_is_another_run(tmp_path):
    for name in ("sample-a", "sample-b"):
        write_training(tmp_path, name, train_config("ddp", 32), make_cluster(2))
    assert len(without_samples(find_runs(tmp_path)[0])[0]) == 2
    write_training(tmp_path, "own", train_config("ddp", 32), make_cluster(2))
    drawn, skipped = without_samples(find_runs(tmp_path)[0])
    assert [make_header.run_id for _, make_header in drawn] == ["own"]
    reason = "2 runs that come with the harness are left out beside others"
    assert skipped == [(tmp_path / "sample-*", reason)]
    assert len(read_results(tmp_path).runs) == 3  # all other readers have them


def test_equal_labels_tell_the_setting_that_differs(tmp_path):
    for buckets in (1, 25):
        config = train_config("ddp", 32, bucket_mb=buckets)
        write_training(tmp_path, f"buckets{buckets}", config, make_cluster(2))
    labels = list(table_of("throughput", tmp_path)["label"])
    assert [label.rpartition(" · ")[2] for label in labels] == ["bucket_mb 1", "bucket_mb 25"]


def test_flags_that_only_steer_a_search_part_no_repeats_of_other_strategies(tmp_path):
    for strategy in ("single", "ddp", "searched"):
        for k, seconds in enumerate((3.0, 120.0)):
            config = train_config(strategy, 32, search_seconds=seconds, predict=k == 0)
            write_training(tmp_path, f"{strategy}{k}", config, make_cluster(2))
    bars = table_of("throughput", tmp_path).set_index("label")["n_repeats"].to_dict()
    cluster = "batch 32 · fp32 · 2 × RTX 3070, 1 Gbit/s"
    assert bars == {
        f"ddp · {cluster}": 2,
        f"searched · {cluster} · search_seconds 3.0": 1,
        f"searched · {cluster} · search_seconds 120.0": 1,
        f"single · {cluster}": 2,
    }


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("throughput_samples_per_s", 299.47, "299.5"),
        ("tokens_per_s", 25312.4, "25312"),
        ("busbw_bytes_per_s", 1.25e9, "1.25 GB/s"),
        ("peak_bytes", 2.0**31, "2 GiB"),
        ("flops_per_s", 1.5e13, "15 TFLOP/s"),
        ("step_s", 0.0123, "12.3 ms"),
        ("efficiency", 0.876, "87.6%"),
        ("error", -0.041, "-4.1%"),
        ("relative_error", 3.012e-7, "3.012e-07"),  # of a product, not of a prediction
        ("n_devices", 5.0, "5"),
        ("mfu", float("nan"), ""),
        ("is_above_peak", True, "yes"),
    ],
)
def test_cells_take_their_unit_from_the_column(column, value, text):
    assert format_value(column, value) == text


def test_columns_that_say_nothing_are_left_out_of_the_report():
    frame = pd.DataFrame(
        {
            "label": ["ddp · a", "ddp · b"],
            "plan": ["a long plan", ""],
            "strategy": ["ddp", "ddp"],
            "mfu": [None, None],
            "compute_s": [0.0, 0.0],
            "step_s": [0.1, None],
            "status": ["ok", "oom"],
            "reason": ["", "too large"],
        }
    )
    shown = present(frame)
    assert shown["headers"] == ["label", "status", "plan", "step"]
    assert shown["styles"] == ["words", "status", "words", "right"]
    assert shown["rows"][1] == {
        "cells": ["ddp · b", "out of memory (too large)", "", ""],
        "is_ok": False,
    }
    none_lost = pd.DataFrame({"cell": ["a", "b"], "regret": [0.0, 0.0], "compute_s": [0.0, 0.0]})
    assert present(none_lost)["headers"] == ["cell", "regret"]
    assert present(pd.DataFrame({"regret": [None]}))["headers"] == []
    assert header_of("exposed_communication_s") == "exposed communication"


def test_names_of_neighbouring_points_do_not_cover_each_other():
    axes = Canvas().add_subplot()
    axes.set_xlim(0.01, 0.3)
    points = [("ddp", 0.104, -0.33), ("searched", 0.119, -0.41), ("hybrid", 0.11, -0.37)]
    points.insert(0, ("ddp", 0.1, -0.3))  # another repeat, not as far off
    known = pd.DataFrame(points, columns=["strategy", "measured_s", "error"])
    _name_misses(axes, known.assign(label=known["strategy"], model="net", predicted_s=0.07), 1.0)
    places = [note.get_window_extent() for note in axes.texts]
    assert [place.count_overlaps(places) for place in places] == [1, 1, 1]  # each its own
    assert {note.get_text() for note in axes.texts} == {
        "net ddp -33%", "net searched -41%", "net hybrid -37%"
    }  # fmt: skip


def test_names_of_misses_clear_each_other_where_the_layout_has_put_them():
    """Beside a wide legend, at the bottom of a figure whose panel is a square."""
    points = [("searched", 15.0, 5.4), ("single", 38.0, 5.4), ("pipeline", 76.0, 5.5),
              ("pipeline-gpipe", 200.0, 5.5), ("ddp", 61.0, 4.3)]  # fmt: skip
    table = pd.DataFrame(points, columns=["strategy", "measured_s", "predicted_s"])
    table["error"] = table["predicted_s"] / table["measured_s"] - 1
    table["low_s"], table["high_s"] = table["measured_s"] / 2, table["measured_s"] * 1.3
    same = {"model": "lenet", "label": table["strategy"], "status": "ok", "reason": ""}
    canvas = drawn("prediction", table.assign(**same))
    places = [note.get_window_extent() for note in canvas.axes[0].texts]
    assert [place.count_overlaps(places) for place in places] == [1] * 5


def test_the_words_about_entries_left_out_stand_above_the_legend():
    canvas = Canvas(layout="constrained")
    axes = canvas.subplots()
    axes.plot([0, 1], label="a")
    joint_legend(canvas, [axes], n_columns=1)
    note_cut(canvas, 24, 60, "entries")
    canvas.draw_without_rendering()
    (legend,) = canvas.legends
    assert legend.get_title().get_text() == "24 of 60 entries; all are in the table"
    assert canvas.get_suptitle() == ""
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


def scaling_of(labels, efficiencies, **more):
    table = pd.DataFrame({"label": labels, "strategy": "ddp", "efficiency": efficiencies})
    same = {"scaling": "strong", "n_devices": 5, "baseline_devices": 1, "status": "ok"}
    return drawn("scaling", table.assign(**same, reason="", **more)).axes[0]


def test_labels_of_neighbouring_efficiencies_do_not_cover_each_other():
    panel = scaling_of(["ddp", "searched"], [0.3, 0.32], low=0.2, high=1.0)
    places = [note.get_window_extent() for note in panel.texts]
    assert [place.count_overlaps(places) for place in places] == [1, 1]


def test_a_crowd_of_lines_leaves_its_labels_at_their_points():
    panel = scaling_of([f"{n}" for n in range(20)], [0.9] * 20, low=0.9, high=0.9)
    assert panel.texts
    assert all(note.get_window_extent().y1 < panel.get_window_extent().y1 for note in panel.texts)


def test_the_legend_of_many_devices_fits_beside_their_panels():
    readings = [{"rank": n, "device": f"rank {n} (node{n}:cuda:0)"} for n in range(32)]
    same = {"label": "net · ddp", "repeat": 0, "status": "ok", "reason": "", "value": 50.0}
    same |= {"metric": "device_utilization_percent", "time_s": 1.0}
    canvas = drawn("device_load", pd.DataFrame(readings).assign(**same))
    (legend,) = canvas.subfigs[0].legends
    assert legend.get_texts()[-1].get_text() == "and 21 more"
    place = legend.get_window_extent()
    assert place.y0 >= 0
    assert place.y1 <= canvas.bbox.y1


def test_the_interval_of_a_bubble_ends_within_its_panel():
    row = {"model": "net", "label": "pipeline", "strategy": "pipeline", "status": "ok"}
    row |= {"reason": "", "n_stages": 2, "n_microbatches": 2, "n_values": 6, "rank": None}
    row |= {"bubble": 0.5, "predicted_bubble": 0.3, "low": 0.3, "high": 0.9}
    canvas = drawn("pipeline_bubble", pd.DataFrame([row]))
    assert canvas.axes[0].get_xlim()[1] >= 90


def test_the_title_of_a_model_with_a_long_name_ends_within_the_figure():
    steps = {"step": [0, 7], "time_s": [0.2, 4.5], "loss": [0.69315, 0.69350]}
    name = "a_very_long_package_name.with_modules.models:make_the_transformer"
    same = {"workload": name, "line": "ddp", "strategy": "ddp", "status": "ok", "reason": ""}
    with drawing_style():
        canvas = drawn("loss", pd.DataFrame(steps).assign(**same))
        ends = [axes.get_tightbbox().x1 for axes in canvas.axes]
    assert max(ends) <= canvas.bbox.x1


def test_long_names_end_within_the_figure_in_titles_and_legends_of_bars():
    with drawing_style():
        canvas = Canvas(layout="constrained")
        name = "a_long_package_name.with_modules" * 5

        def draw(axes, model, rows):
            axes.plot([0, 1], label=name)

        panels = draw_bar_panels(canvas, [(name, pd.DataFrame({"a": [1]}))], draw)
        joint_legend(canvas, panels, n_columns=2)
        canvas.draw_without_rendering()
        (legend,) = canvas.legends
        ends = panels[0].get_tightbbox(), legend.get_window_extent()
    assert all(one.x0 >= 0 and one.x1 <= canvas.bbox.x1 for one in ends)

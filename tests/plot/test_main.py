"""The command line and the report: what is written, what is skipped and named, what is escaped."""

from __future__ import annotations

import json
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from launching import completed
from measured_runs import (
    catalog_of,
    copies,
    make_cluster,
    make_header,
    train_config,
    training_records,
    write_run,
    write_training,
)

from harness.measure.store import find_runs
from harness.plot.__main__ import main
from harness.plot.catalog import read_catalog
from harness.plot.figures import FIGURES, load_figure
from harness.plot.render import image_bytes

SAMPLES = Path(__file__).parents[2] / "results"
HOSTILE = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Tags, their links and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        self.links += [named[name] or "" for name in ("src", "href") if name in named]
        self.anchors.add(named.get("id") or "")

    def handle_data(self, data):
        self.text += data


def plot(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def drawn(comparison):
    """The figures that have data."""
    catalog = catalog_of(comparison)
    return [name for name in FIGURES if not load_figure(name).table(catalog).empty]


@pytest.fixture(scope="module")
def plots(comparison, tmp_path_factory):
    out = tmp_path_factory.mktemp("plots")
    assert plot(comparison, "--output", out) == 0
    return out


def test_every_figure_is_written_with_its_table_and_a_report(plots, drawn):
    names = {path.name for path in plots.iterdir()}
    expected = {f"{name}.{suffix}" for name in drawn for suffix in ("png", "csv")}
    assert names == expected | {"report.html"}
    assert (plots / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_report_is_self_contained(plots, drawn):
    page = Page((plots / "report.html").read_text())
    assert "script" not in page.tags
    assert "link" not in page.tags
    for link in page.links:
        assert link.startswith(("data:image/svg+xml;base64,", "#"))
    assert sum(link.startswith("data:") for link in page.links) == len(drawn)
    targets = {link[1:] for link in page.links if link.startswith("#")}
    assert targets <= page.anchors
    assert set(drawn) <= targets


def test_report_holds_the_environment_and_what_failed(plots):
    text = Page((plots / "report.html").read_text()).text
    for expected in (
        "11 runs (10 ok, 1 out of memory)",
        "tesla3",
        "2.13.0",
        "0123456789ab",
        "entry.sh train",
        "CUDA out of memory on rank 3",
        "Higher is better.",
        "NVIDIA GeForce RTX 3070",
    ):
        assert expected in text


def test_report_begins_with_an_answer_its_table_and_warnings(plots):
    page = Page((plots / "report.html").read_text())
    first = page.links[:3]
    assert first == ["#strategies", "#warnings", "#others"]
    order = [
        "resnet50 · batch 32 · fp32",
        "No verdict yet: one device was fastest",
        "ddp on 5",
        "Speed-up and verdict compare each strategy with single on 1.",
        "Warnings",
        "1 step far above the others",
        "Other comparisons",
        "resnet50 · batch 160 · fp32",
        "Speed-up and verdict compare each strategy with ddp on 5.",
        "Training throughput by strategy",
    ]
    places = [page.text.index(words) for words in order]
    assert places == sorted(places)


def test_equal_results_give_an_equal_report(comparison, plots, tmp_path):
    names = ("throughput", "link_heatmap")
    assert plot(comparison, "--output", tmp_path / "once", "--only", *names) == 0
    assert plot(comparison, "--output", tmp_path / "again", "--only", *names) == 0
    for path in (tmp_path / "once").iterdir():
        again = (tmp_path / "again" / path.name).read_bytes()
        assert again == path.read_bytes(), path.name
        if path.name != "report.html":
            assert again == (plots / path.name).read_bytes(), path.name


def test_equal_tables_give_equal_images_wherever_objects_lie_in_memory():
    """The solver of the layout adds up in the order of addresses; several parts show it."""
    figure = load_figure("timeline")
    table = figure.table(read_catalog(find_runs(SAMPLES)[0]))
    table = table.groupby(["label", "side", "rank"]).head(1)  # all parts, and a span of each
    kept, images = [], set()
    for n in range(4):
        kept.append([object() for _ in range(1000 * n)])
        images.update(image_bytes(figure, table, "svg"))
    assert len(images) == 1


def test_only_draws_what_is_named(comparison, tmp_path):
    arguments = (comparison, "--output", tmp_path, "--only", "matmul", "memory", "--format", "svg")
    assert plot(*arguments) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"matmul.svg", "matmul.csv", "memory.svg", "memory.csv", "report.html"}


def test_json_holds_the_tables(comparison, tmp_path, capsys):
    assert plot(comparison, "--output", tmp_path, "--only", "throughput", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(tmp_path / "report.html")
    assert printed["answers"][0]["sentence"].startswith("No verdict yet: one device was fastest")
    strategies = printed["answers"][0]["strategies"]
    found = [(one["strategy"], one["verdict"] and one["verdict"]["outcome"]) for one in strategies]
    assert ("ddp on 5", "inconclusive") in found
    assert printed["warnings"]["Runs that are not ok"] == [
        "too-large: out of memory: CUDA out of memory on rank 3: tried to allocate 2.4 GiB"
    ]
    rows = printed["tables"]["throughput"]
    assert {row["status"] for row in rows} == {"ok", "oom"}
    failed = next(row for row in rows if row["status"] == "oom")
    assert failed["throughput_samples_per_s"] is None


def test_samples_of_the_repository_do_not_stand_beside_own_runs(comparison, tmp_path, capsys):
    shutil.copytree(comparison / "single", tmp_path / "results" / "sample-single")
    shutil.copytree(comparison / "pipeline", tmp_path / "results" / "pipeline")
    arguments = (tmp_path / "results", "--output", tmp_path, "--only", "throughput", "--json")
    assert plot(*arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in printed["tables"]["throughput"]] == ["pipeline"]
    assert [Path(path).name for path, _ in printed["skipped"]] == ["sample-*"]
    assert "Files and lines that" not in (tmp_path / "report.html").read_text()  # no warning


def test_hostile_names_stay_text(tmp_path):
    made = make_header(
        "train",
        train_config("ddp", 32, model=f"$x_{HOSTILE}"),
        make_cluster(2),
        run_id="hostile",
        argv=["entry.sh", HOSTILE],
        versions={HOSTILE: HOSTILE},
    )
    ranks = [msgspec.structs.replace(rank, hostname=HOSTILE) for rank in made.ranks]
    made = msgspec.structs.replace(made, ranks=ranks)
    write_run(tmp_path / "results", made, training_records(2, 32, 0.1, 0.1))
    failed = msgspec.structs.replace(made, run_id="failed", status="crash", reason=HOSTILE)
    write_run(tmp_path / "results", failed, {})
    assert plot(tmp_path / "results", "--output", tmp_path / "plots") == 0
    html = (tmp_path / "plots" / "report.html").read_text()
    assert HOSTILE not in html
    page = Page(html)
    assert "script" not in page.tags
    assert HOSTILE in page.text


def test_figures_without_data_are_named(tmp_path, capsys):
    write_training(tmp_path / "results", "one", train_config("ddp", 32), make_cluster(2))
    only = ("--only", "throughput", "link_heatmap")
    assert plot(tmp_path / "results", "--output", tmp_path / "plots", *only) == 0
    printed = capsys.readouterr().out
    assert "not drawn: link_heatmap: no data: it needs a links run of two" in printed
    assert not (tmp_path / "plots" / "link_heatmap.png").exists()
    assert "link_heatmap" in Page((tmp_path / "plots" / "report.html").read_text()).text


def test_a_single_run_directory_can_be_drawn(comparison, tmp_path, capsys):
    assert plot(comparison / "links", "--output", tmp_path, "--only", "bandwidth") == 0
    assert (tmp_path / "bandwidth.png").exists()
    capsys.readouterr()
    assert plot(comparison / "links", "--output", tmp_path, "--only", "goodput") == 0
    assert f"drawn into {tmp_path}: no figure\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "is not a directory"),
        (["."], "holds no run: make one"),
        ([".", "--only", "nonsense"], "no figure is called 'nonsense': choose from throughput"),
        (["import"], "name a log, or a directory of logs"),
        (["import", "absent"], "no log could be imported from absent: give"),
    ],
)
def test_nothing_to_draw_is_one_clear_error(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_results_of_an_older_version_are_refused_with_the_remedy(comparison, tmp_path, capsys):
    old = copies(comparison, tmp_path / "results", "links") / "links"
    text = (old / "run.json").read_text()
    (old / "run.json").write_text(text.replace('"version": 3\n}', '"version": 1\n}'))
    assert main([str(tmp_path / "results"), "--output", str(tmp_path / "plots")]) == 2
    printed = capsys.readouterr().err
    assert "holds no run, but 1 other entries" in printed
    assert f"skipped {old}" in printed
    assert "version 1, this harness reads harness-run version 3: run it" in printed


def test_help_does_not_wait_for_libraries():
    program = (
        "import sys; from harness.plot.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'matplotlib', 'pandas', 'numpy', 'scipy', 'torch', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    start = time.perf_counter()
    done = completed(sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "link_heatmap" in done.stdout
    assert time.perf_counter() - start < 10  # a hang, not a slow machine


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch-per-device 0", "--batch-per-device 0 must be above 0, and at most 2**31"),
        ("--batch-per-device 999999999999999999999", "must be above 0, and at most 2**31"),
        ("--into {log}", "--into {log} cannot be written (Not a directory): give a directory"),
    ],
)
def test_logs_are_not_imported_into_runs_that_cannot_be_read(tmp_path, capsys, flags, message):
    log = tmp_path / "a.csv"
    log.write_text("Rank,Epoch,Epoch_Time\n0,1,5\n")
    assert main(["import", str(log), *flags.format(log=log).split()]) == 2
    assert message.format(log=log) in capsys.readouterr().err


def test_what_labels_imported_runs_without_being_said_is_printed(tmp_path, capsys):
    log = tmp_path / "a.csv"
    log.write_text("Rank,Epoch,Epoch_Time\n0,1,5\n")
    given = ["--device-kind", "T4", "--device-memory", "8GiB", "--model", "resnet18"]
    assert main(["import", str(log), "--into", str(tmp_path / "runs"), *given]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("assumed where a log does not say it: --dataset cifar10 --dtype fp32")
    assert "--model" not in last

"""Records and headers of any form: only HarnessError comes out, and good runs stay drawn."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import read_results
from measured_runs import copies

from harness.cases import finished_repeats
from harness.errors import HarnessError
from harness.measure.rank_records import MAX_NAMED
from harness.measure.store import find_runs, read_header
from harness.plot.__main__ import main
from harness.plot.catalog import read_catalog
from harness.plot.figures import FIGURES, load_figure
from harness.plot.headlines import answers, warnings
from harness.plot.numbers import read_plan
from harness.plot.report import present
from harness.plot.trace import trace_bytes
from harness.workloads.links.workload import links_text
from harness.workloads.matmul.workload import matmul_text
from harness.workloads.profile.table import profile_text
from harness.workloads.train.table import train_text

SAMPLES = Path(__file__).parents[2] / "results"
GOOD = "sample-train-single-r1"
CHANGED = (
    *("sample-links", "sample-matmul", "sample-search"),
    *("sample-train-ddp-r0", "sample-train-pipeline-r0", "sample-train-searched-r0"),
)

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, 10**400,
    0.0, -0.0, 1e-320, 1e-30, -1e-3, 1e9, 1e30, 1e308, -1e308, float("inf"), float("nan"),
    "", "x", "²", "٣", "1", "nan", "a\nb", "\x00", "../../x", "é" * 2000, "$x^2$", "9" * 5000,
    [], [[]], [1], ["x"], [None], {}, {"a": 1}, {"": {}},
    json.loads("[" * 90 + "]" * 90),
]  # fmt: skip
LINES = [
    b"", b"\n\n", b"{", b"[]", b"null", b"\x00\xff\xfe", b"\xed\xa0\x80", b'{"type":"span"}',
    b'{"type":"sample","metric":"loss","value":1e999}', b"[" * 5000, b'{"a":' * 5000,
    b" " * 100_000, b"9" * 100_000, b'{"type":"span","kind":"step","start_s":0,"duration_s":0}',
]  # fmt: skip


def places(value, at=()):
    """The path of every part of a JSON value."""
    parts = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    return [at, *(place for key, part in parts for place in places(part, (*at, key)))]


def changed(value, at, new):
    """The value with another part, or without it where `new` is `...`."""
    if not at:
        return new
    copy = value.copy()
    if len(at) == 1 and new is ...:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


def change_json(draw, data):
    """One part of a JSON value replaced, removed or added."""
    value = json.loads(data)
    at = draw(st.sampled_from(places(value)))
    new = draw(st.sampled_from([..., *VALUES]))
    return json.dumps(changed(value, at, new) if at or new is not ... else None).encode()


def change_records(draw, path):
    """A line of one rank replaced, cut or changed in one part, one to three times."""
    lines = path.read_bytes().splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        what = draw(st.sampled_from(["part", "part", "part", "line", "cut", "again"]))
        if what == "part":
            try:  # it may have been changed before
                lines[at] = change_json(draw, lines[at])
            except ValueError:
                lines[at] = b""
        elif what == "line":
            lines[at] = draw(st.sampled_from(LINES))
        elif what == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        else:
            lines.insert(at, lines[at])
    path.write_bytes(b"\n".join(lines) + draw(st.sampled_from([b"", b"\n"])))


def change_json_file(draw, path):
    """`run.json`, or what was planned."""
    data = path.read_bytes()
    for _ in range(draw(st.integers(1, 2))):
        data = change_json(draw, data)
    path.write_bytes(data[: draw(st.sampled_from([len(data), len(data) // 2]))])


def change_files(draw, path):
    """A file that is gone, a directory, empty, binary, or called otherwise."""
    what = draw(
        st.sampled_from(["gone", "directory", "empty", "binary", "rank²", "rank07", "rank9"])
    )
    if what.startswith("rank"):
        path.rename(path.with_name(f"{what}.jsonl"))
        return
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what != "gone":
        path.write_bytes(b"" if what == "empty" else bytes(range(256)) * 50)


def change_run(draw, run_dir):
    """Change one file of a run."""
    path = draw(st.sampled_from(sorted(run_dir.iterdir())))
    is_whole_file = draw(st.integers(0, 5)) == 0
    if is_whole_file:
        change_files(draw, path)
    elif path.suffix == ".jsonl":
        change_records(draw, path)
    elif path.suffix == ".json":
        change_json_file(draw, path)


def check(root, run_dir):
    """Read, derive and present everything; whatever else than HarnessError escapes is a failure."""
    results = read_results(root)
    assert GOOD in {run.path.name for run in results.runs}
    catalog = read_catalog(*find_runs(root))
    assert not any("cannot be derived" in reason for _, reason in catalog.skipped)
    for name in FIGURES:
        figure = load_figure(name)
        table = figure.table(catalog)
        if not table.empty:
            present(figure.report_table(table))
    assert "single" in set(load_figure("throughput").table(catalog)["strategy"])
    answers(catalog)
    warnings(catalog)
    finished_repeats(root)
    of_workload = {
        "train": train_text, "links": links_text, "matmul": matmul_text, "profile": profile_text,
    }  # fmt: skip
    for run in results.runs:
        if run.header.workload in of_workload:
            of_workload[run.header.workload]([run])
        with contextlib.suppress(HarnessError):
            trace_bytes(run, read_plan(run_dir)[0])


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(CHANGED))
def test_a_changed_run_costs_itself_and_nothing_else(data, name):
    with TemporaryDirectory() as directory:
        root = copies(SAMPLES, Path(directory), name, GOOD)
        change_run(data.draw, root / name)
        check(root, root / name)


HOSTILE = {
    "sample-links": ('"target":2', '"target":"x"'),
    "sample-matmul": ('"n":512', '"n":"²"'),
    "sample-train-ddp-r0": ('"kind":"step","start_s":', '"kind":"step","start_s":null,"was":'),
}


def test_what_cannot_be_used_is_named_and_the_rest_is_drawn(tmp_path, capsys):
    root = copies(SAMPLES, tmp_path / "results", GOOD, *HOSTILE)
    for name, (old, new) in HOSTILE.items():
        path = root / name / "rank0.jsonl"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
    (root / GOOD / "rank0.jsonl").rename(root / GOOD / "rank².jsonl")
    (root / GOOD / "rank0.jsonl").write_bytes((SAMPLES / GOOD / "rank0.jsonl").read_bytes())
    only = ["throughput", "matmul", "link_heatmap"]
    assert main([str(root), "--output", str(tmp_path / "out"), "--only", *only]) == 0
    shown = capsys.readouterr()
    assert "label target" not in shown.err
    assert "link_latency_s has target 'x': it must be a whole number from 0 to 65536" in shown.err
    assert "matmul_s has n '²': it must be a whole number" in shown.err
    assert "rank².jsonl: not a rank<k>.jsonl file" in shown.err
    assert "sample-train-ddp-r0/rank0.jsonl: line 5: Expected `float`, got `null`" in shown.err
    assert {f"{name}.png" for name in only} <= set(os.listdir(tmp_path / "out"))
    assert "it must be a whole number" in (tmp_path / "out" / "report.html").read_text()


def test_a_figure_that_fails_is_named_and_the_others_are_drawn(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise ValueError("no such colour\nand more")

    monkeypatch.setattr("harness.plot.figures.throughput._draw_model", fail)
    root = copies(SAMPLES, tmp_path / "results", GOOD)
    only = ["throughput", "step_time"]
    assert main([str(root), "--output", str(tmp_path / "out"), "--only", *only]) == 1
    assert "failed: throughput: ValueError: no such colour\n" in capsys.readouterr().err
    assert (tmp_path / "out" / "step_time.png").exists()
    assert not (tmp_path / "out" / "throughput.png").exists()
    assert "no such colour" in (tmp_path / "out" / "report.html").read_text()


def test_many_bad_lines_are_counted_and_a_few_are_named(tmp_path):
    run_dir = copies(SAMPLES, tmp_path, GOOD) / GOOD
    with (run_dir / "rank0.jsonl").open("ab") as file:
        file.write(b"{}\n" * 5000 + b"9" * 500_000)
    results = read_results(tmp_path)
    reasons = [reason for _, reason in results.skipped]
    assert len(reasons) == MAX_NAMED + 1
    assert reasons[0].startswith("line 107: ")
    assert reasons[-1] == "5005 more lines, 5008 in all"
    assert len(results.runs[0].ranks[0]) == 106


def test_a_rank_that_is_missing_one_that_is_cut_and_one_too_many_are_named(tmp_path):
    run_dir = copies(SAMPLES, tmp_path, "sample-train-ddp-r0") / "sample-train-ddp-r0"
    (run_dir / "rank3.jsonl").rename(run_dir / "rank8.jsonl")
    (run_dir / "rank4.jsonl").write_bytes(b"")
    whole = (run_dir / "rank2.jsonl").read_bytes()
    (run_dir / "rank2.jsonl").write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 9])
    n_lines = whole.count(b"\n")
    results = read_results(tmp_path)
    assert {path.name: reason for path, reason in results.skipped} == {
        "rank2.jsonl": f"line {n_lines}: the file ends within this line, so the numbers lack what "
        "followed: was a copy interrupted?",
        "rank3.jsonl": "missing or empty: the numbers of the run are of its other ranks",
        "rank4.jsonl": "missing or empty: the numbers of the run are of its other ranks",
        "rank8.jsonl": "the run has 5 ranks, not a rank 8",
    }
    assert sorted(results.runs[0].ranks) == [0, 1, 2, 4]


def test_a_run_that_has_lost_all_its_records_is_named(tmp_path):
    run_dir = copies(SAMPLES, tmp_path, GOOD) / GOOD
    for path in run_dir.glob("rank*.jsonl"):
        path.unlink()
    reason = "missing or empty, as of all ranks: the run has no numbers"
    assert read_results(tmp_path).skipped == [(run_dir / "rank0.jsonl", reason)]


def test_a_copy_of_a_run_is_not_a_repeat(tmp_path):
    copies(SAMPLES, tmp_path, GOOD)
    shutil.copytree(tmp_path / GOOD, tmp_path / "z-copy")
    results = read_results(tmp_path)
    assert [run.path.name for run in results.runs] == [GOOD]
    assert results.skipped == [(tmp_path / "z-copy", f"the same run as {GOOD}, counted once")]


def test_a_pipe_in_place_of_a_file_is_skipped(tmp_path):
    run_dir = copies(SAMPLES, tmp_path, GOOD) / GOOD
    for name in ("rank0.jsonl", "strategy.json"):
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)
    catalog = read_catalog(*find_runs(tmp_path))
    reasons = [reason.lower() for _, reason in catalog.skipped]
    assert ["not a regular file" in reason for reason in reasons] == [True] * 2
    (run_dir / "run.json").unlink()
    os.mkfifo(run_dir / "run.json")
    with pytest.raises(HarnessError, match="Not a regular file"):
        read_header(run_dir)


@pytest.mark.parametrize("run_id", ["../../x", "/etc/x", "..", "", "a\nb"])
def test_a_run_does_not_name_a_file_elsewhere(tmp_path, run_id):
    run_dir = copies(SAMPLES, tmp_path, GOOD) / GOOD
    header = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(header | {"run_id": run_id}))
    with pytest.raises(HarnessError, match="it must be a directory's name"):
        read_header(run_dir)

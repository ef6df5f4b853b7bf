"""Foreign logs: variants of both kinds, and the published ones where they are at hand."""

from pathlib import Path

import numpy as np
import pytest
from made_runs import read_results

from harness.errors import ResultsError
from harness.measure.derive.spans import samples_of, spans_of
from harness.measure.derive.training import training_summary
from harness.measure.store import find_runs
from harness.plot.catalog import read_catalog
from harness.plot.figures import load_figure
from harness.plot.imports import ImportFacts, import_logs
from harness.plot.imports.deepspeed_log import parse_deepspeed_log
from harness.plot.imports.epoch_csv import parse_epoch_csv
from harness.plot.render import image_bytes

HEADER = (
    "Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,"
    "GPU_Free_Mem_MB,GPU_Used_Mem_MB,GPU_Total_Mem_MB,GPU_Temp_C"
)
GPU = "NVIDIA GeForce RTX 3070"
LOGS = Path(__file__).parents[4] / "shared" / "data" / "tesla_logs"
STEP = (
    "[2024-11-17 16:35:0{second},846] [INFO] [logging.py:128:log_dist] [Rank 0] time (ms) | "
    "fwd: 60.00 | bwd: 640.00 | bwd_inner: 140.00 | bwd_allreduce: 500.00 | step: 20.00"
)


def row(rank, epoch, duration_s, at="2024-11-17 20:00:00"):
    return f"{at},{rank},{epoch},{duration_s},0,{GPU},99.0%,4096.0,4096.0,8192.0,61.0"


def csv_text(*rows):
    return "\n".join([HEADER, *rows]) + "\n"


def imported(tmp_path, name, text, **facts):
    path = tmp_path / name
    path.write_text(text)
    _, problems = import_logs([path], tmp_path / "results", ImportFacts(**facts))
    assert problems == []
    return read_results(tmp_path / "results").runs


def test_epochs_become_samples_and_the_header_says_what_is_known(tmp_path):
    text = csv_text(row(1, 1, 100.5), row(0, 1, 100.0), row(0, 2, 99.0), row(1, 2, 99.5))
    (run,) = imported(tmp_path, "vit_b16_strong_2gpu.csv", text)
    header = run.header
    assert header.run_id == "imported-vit_b16_strong_2gpu"
    assert (header.status, header.workload, header.commit) == ("ok", "train", "")
    assert header.config["source"] == "vit_b16_strong_2gpu.csv"
    assert (header.config["model"], header.config["global_batch"]) == ("vit_b_16", 32)
    assert [info.device_kind for info in header.ranks] == [GPU, GPU]
    assert header.ranks[0].memory_bytes == 8 * 2**30
    assert [node.name for node in header.cluster.nodes] == ["node0", "node1"]
    assert [r.value for r in samples_of(run.ranks[1], "epoch_s")] == [100.5, 99.5]
    summary = training_summary(run)
    assert (summary.unit, summary.n_samples) == ("epoch", 50_000)
    assert summary.throughput == pytest.approx(50_000 / 100.0)  # median of 100.5 and 99.5
    assert summary.memory_bytes == {"used": 4 * 2**30}


def test_weak_scaling_logs_train_a_share_on_each_device(tmp_path):
    text = csv_text(row(0, 1, 71.0), row(1, 1, 72.0))
    (run,) = imported(tmp_path, "vit_b16_weak_2gpu.csv", text)
    assert training_summary(run).n_samples == 10_000


@pytest.mark.parametrize(
    "at",
    ["2024-11-17T20:00:00", "2024-11-17T20:00:00.000", "2024-11-17T20:00:00Z",
     "2024-11-17T21:00:00+01:00"],
)  # fmt: skip
def test_iso_times_are_read(tmp_path, at):
    (run,) = imported(tmp_path, "a_1gpu.csv", csv_text(row(0, 1, 60.0, at=at)))
    assert run.header.start_utc == "2024-11-17T19:59:00"
    assert run.header.duration_s == 60.0


def test_a_truncated_last_line_loses_itself_and_nothing_else(tmp_path):
    whole = csv_text(row(0, 1, 5.0), row(0, 2, 712.5)).rstrip("\n")
    start = whole.rindex("\n") + 1
    for cut in range(start + 1, len(whole) + 1):
        rows, problems = parse_epoch_csv(whole[:cut], tmp_path)
        assert rows[0].duration_s == 5.0
        # Only a line with every column counts; its last field may be cut and is not used.
        if len(rows) == 2:
            assert (rows[1].duration_s, rows[1].temperature_c) == (712.5, None)
        else:
            assert problems[0].startswith("line 3: ")


def test_importing_again_replaces_what_was_there(tmp_path):
    two = csv_text(row(0, 1, 5.0), row(1, 1, 5.0))
    imported(tmp_path, "log.csv", two)
    files = {p: p.read_bytes() for p in (tmp_path / "results").rglob("*") if p.is_file()}
    imported(tmp_path, "log.csv", two)
    assert {p: p.read_bytes() for p in (tmp_path / "results").rglob("*") if p.is_file()} == files
    (run,) = imported(tmp_path, "log.csv", csv_text(row(0, 1, 5.0)))
    assert sorted(run.ranks) == [0]


def test_files_of_other_kinds_are_named_and_do_not_stop_the_rest(tmp_path):
    (tmp_path / "a.csv").write_text("time,value\n1,2\n")
    (tmp_path / "b.csv").write_text(csv_text(row(0, 1, 5.0)))
    (tmp_path / "c.log").write_bytes(b"\xff\xfe\x00 nothing")
    (tmp_path / "d.csv").write_text(HEADER + "\n")
    written, problems = import_logs([tmp_path], tmp_path / "r", ImportFacts())
    assert [path.name for path in written] == ["imported-b"]
    assert [path.name for path, _ in problems] == ["a.csv", "c.log", "d.csv"]


def test_flags_do_not_replace_the_gpus_that_a_csv_names(tmp_path):
    text = "Rank,Epoch,Epoch_Time,GPU_Name\n0,1,2.5,P4\n1,1,2.5,T4\n2,1,2.5,\n"
    (run,) = imported(tmp_path, "gpus.csv", text, device_kind=GPU, device_memory="8GiB")
    assert [info.device_kind for info in run.header.ranks] == ["P4", "T4", GPU]
    assert [info.memory_bytes for info in run.header.ranks] == [8 * 2**30] * 3


def deepspeed_text(n):
    lines = [STEP.format(second=second) for second in range(n)]
    noise = "[2024-11-17 16:35:03,846] [INFO] [Rank 0] step=10, skipped=0, lr=[0.001]"
    return "\n".join([noise, *lines[:1], "", noise, *lines[1:]]) + "\n"


def test_deepspeed_lines_become_spans_without_a_data_phase(tmp_path):
    facts = {"device_kind": GPU, "device_memory": "8GiB"}
    (run,) = imported(tmp_path, "x_3gpu_steps.log", deepspeed_text(3), **facts)
    spans = spans_of(run.ranks[0])
    assert {span.kind for span in spans} == {
        "step", "forward", "backward", "communication", "optimizer"
    }  # fmt: skip
    assert len(run.header.ranks) == 3
    summary = training_summary(run)
    assert summary.duration.median == pytest.approx(0.72)
    assert summary.n_samples == 48
    assert summary.phases["exposed_communication"] == pytest.approx(0.5)
    assert summary.phases["data"] == 0
    assert summary.phases["other"] == pytest.approx(0, abs=1e-9)
    # A line is written when its step ends, a second after the one before.
    starts = [span.start_s for span in spans if span.kind == "step"]
    assert np.diff(starts) == pytest.approx([1.0, 1.0])


def test_deepspeed_log_takes_its_gpu_from_the_csv_beside_it(tmp_path):
    (tmp_path / "y_1gpu.csv").write_text(csv_text(row(0, 1, 5.0)))
    (tmp_path / "y_1gpu_steps.log").write_text(deepspeed_text(2))
    written, problems = import_logs([tmp_path], tmp_path / "r", ImportFacts())
    assert (len(written), problems) == (2, [])
    (tmp_path / "y_2gpu_steps.log").write_text(deepspeed_text(2))
    _, problems = import_logs([tmp_path / "y_2gpu_steps.log"], tmp_path / "r", ImportFacts())
    assert "give --device-kind and --device-memory" in problems[0][1]
    facts = ImportFacts(device_kind="T4")
    written, problems = import_logs([tmp_path / "y_1gpu_steps.log"], tmp_path / "r", facts)
    assert (written, problems[0][1]) == (
        [],
        "names no GPU: give both --device-kind and --device-memory",
    )


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ("", None),
        ("Traceback (most recent call last):\n  File x\nOSError: full\nmore\n", "OSError: full"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   at y\n[rank1]: Lost: one\n",
         "Lost: one"),
        ("[ERROR] Process 12 exits with return code = -9\n", "its launcher reports exit code -9"),
        ("[INFO] Process 12 exits successfully.\n", None),
    ],
)  # fmt: skip
def test_an_error_after_the_last_deepspeed_step_is_told(after, error, tmp_path):
    (tmp_path / "log.log").write_text(
        "Traceback (most recent call last):\n" + deepspeed_text(2) + after
    )
    facts = ImportFacts(device_kind="GPU", device_memory="8GiB")
    written, problems = import_logs([tmp_path / "log.log"], tmp_path, facts)
    assert len(written) == 1
    told = [why for _, why in problems]
    assert told == [f"training ended with an error ({error}): its steps are kept"] * bool(error)


def test_a_cut_deepspeed_line_is_named(tmp_path):
    text = deepspeed_text(3).rstrip("\n")
    for cut in (1, 5, 12, 40):
        steps, problems = parse_deepspeed_log(text[:-cut], tmp_path)
        assert len(steps) == 2
        assert len(problems) == 1


@pytest.mark.skipif(not LOGS.is_dir(), reason="the published logs are not at hand")
def test_published_logs_stand_in_the_scaling_figure(tmp_path):
    written, problems = import_logs([LOGS], tmp_path, ImportFacts())
    assert (len(written), problems) == (7, [])
    catalog = read_catalog(*find_runs(tmp_path))
    assert catalog.skipped == []
    table = load_figure("scaling").table(catalog)
    found = {(row.scaling, row.n_devices): round(row.efficiency, 2) for row in table.itertuples()}
    # Medians of the files' own epochs: 712.9, 916.4, 743.6 s; 71.37, 177.6, 215.8 s.
    assert found == {
        ("strong", 1): 1.0, ("strong", 2): 0.39, ("strong", 3): 0.32,
        ("weak", 1): 1.0, ("weak", 2): 0.40, ("weak", 3): 0.33,
    }  # fmt: skip
    breakdown = load_figure("step_breakdown").table(catalog)
    (share,) = breakdown["exposed_communication_s"] / breakdown["step_s"]
    assert 0.6 < share < 0.75
    for name in ("scaling", "device_load"):
        figure = load_figure(name)
        drawn = figure.table(catalog)
        assert image_bytes(figure, drawn, "svg")


@pytest.mark.parametrize(
    ("heading", "duration_s"),
    [("Epoch_Time (ms)", 0.25), ("Epoch Time [hrs]", 900_000.0), ("Duration (ns)", 2.5e-7)],
)
def test_a_time_is_read_in_its_headings_unit(heading, duration_s):
    (row,), _ = parse_epoch_csv(f"Rank,Epoch,{heading}\n0,1,250\n", Path("epochs.csv"))
    assert row.duration_s == pytest.approx(duration_s)


def test_a_time_of_an_unknown_unit_is_refused():
    with pytest.raises(ResultsError, match=r"'Epoch_Time \(days\)', whose unit is unknown"):
        parse_epoch_csv("Rank,Epoch,Epoch_Time (days)\n0,1,250\n", Path("epochs.csv"))


def test_a_column_that_is_there_twice_is_refused():
    with pytest.raises(ResultsError, match="has the column 'Epoch_Time' twice: leave one out"):
        parse_epoch_csv("Rank,Epoch,Epoch_Time,epoch time\n0,1,2,3\n", Path("epochs.csv"))


@pytest.mark.parametrize(
    ("good", "bad", "why"),
    [
        ("[Rank 0]", "[Rank 99999]", "its rank is above 16384"),
        ("bwd_inner: 140.00", "bwd_inner: 9999.00", "bwd_inner and bwd_allreduce take longer than"),
        ("fwd: 60.00 | bwd: 640.00 | bwd_inner: 140.00 | bwd_allreduce: 500.00 | step: 20.00",
         "fwd: 0.00 | bwd: 0.00 | step: 0.00", "its step takes no time"),
    ],
)  # fmt: skip
def test_lines_that_contradict_themselves_are_left_out(good, bad, why):
    line = STEP.format(second=4)
    steps, problems = parse_deepspeed_log(f"{line.replace(good, bad)}\n{line}\n", Path("ds.log"))
    assert len(steps) == 1
    assert problems[0].startswith(f"line 1: {why}")

"""Logs as other people's programs write them: what each says, worked out by hand."""

from contextlib import suppress
from pathlib import Path

import pytest
from made_runs import read_results

from harness.errors import ResultsError
from harness.measure.derive.spans import samples_of, spans_of
from harness.measure.derive.training import training_summary
from harness.plot.imports import READERS, ImportFacts, import_logs
from harness.plot.imports.deepspeed_log import accumulation, is_deepspeed_log, parse_deepspeed_log
from harness.plot.imports.epoch_csv import FAR_RANK, NO_NUMBER, is_epoch_csv, parse_epoch_csv
from harness.plot.imports.runs import decode, plain, read_number

LOGS = Path(__file__).parents[1] / "logs"
FACTS = ImportFacts(device_kind="Card", device_memory="8GiB")
HEADER = "Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,GPU_Used_Mem_MB"
STEP = (
    "time (ms) | fwd: 60.10 | bwd: 140.20 | bwd_inner: 100.10 | bwd_allreduce: 40.10 | step: 9.00"
)


def imported(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    _, problems = import_logs([tmp_path / name], tmp_path / "results", FACTS)
    (tmp_path / "results").mkdir(exist_ok=True)
    return read_results(tmp_path / "results").runs, [reason for _, reason in problems]


def values(run, metric, rank=0):
    return [r.value for r in samples_of(run.ranks[rank], metric)]


@pytest.mark.parametrize("path", sorted(LOGS.glob("c*.csv")), ids=lambda path: path.stem)
def test_each_epoch_csv_is_read_for_what_it_says(path, tmp_path):
    (run,), problems = imported(tmp_path, path.name, path.read_bytes())
    is_missing = "missing" in path.name
    assert problems == (["no line of rank 1 of 3: the others are kept"] if is_missing else [])
    steps = [r.step for r in samples_of(run.ranks[0], "epoch_s")]
    assert steps == [0, 1, 2]
    assert values(run, "epoch_s") == ([100.0] * 3 if is_missing else [101.0, 102.0, 103.0])
    assert values(run, "epoch_s", 2 if is_missing else 1) == (
        [100.0] * 3 if is_missing else [102.0, 103.0, 104.0]
    )
    assert values(run, "memory_used_bytes") == [5000 * 2**20] * 3
    assert values(run, "device_utilization_percent") == [97.0] * 3
    assert values(run, "device_temperature_c") == [70.0] * 3
    name = "NVIDIA GeForce RTX 3070" + (", 8GB" if "quoted" in path.name else "")
    assert {device.kind for device in run.header.cluster.devices} == {name}
    assert {device.memory_bytes for device in run.header.cluster.devices} == {8192 * 2**20}
    assert len(run.header.ranks) == (3 if is_missing else 2)
    assert training_summary(run).n_samples == pytest.approx(50_000)


# Steps by file; each is 209.3 ms and more by the numbers that its generator counts up.
STEPS = {
    "e01-old-names_4gpu.log": 12, "e03-2020_1gpu.log": 12, "e05-mpirun-tag_2gpu.log": 12,
    "e07-tqdm_4gpu.log": 6, "e09-ansi_4gpu.log": 8, "e11-megatron-mixed_8gpu.log": 8,
    "e15-zenflow_4gpu.log": 6, "e17-us-locale_2gpu.log": 6, "e19-crlf_2gpu.log": 6,
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_each_deepspeed_log_is_read_for_what_it_says(name, tmp_path):
    (run,), problems = imported(tmp_path, name, (LOGS / name).read_bytes())
    spans = spans_of(run.ranks[0])
    firsts = {span.kind: span.duration_s for span in spans if span.step == 0}
    assert firsts == pytest.approx(
        {"step": 0.2093, "forward": 0.0601, "backward": 0.1001, "communication": 0.0401,
         "optimizer": 0.009}
    )  # fmt: skip
    assert [s.duration_s for s in spans if s.kind == "forward"] == pytest.approx(
        [(60.1 + i % 3) * 1e-3 for i in range(STEPS[name])]
    )
    assert run.header.config["global_batch"] == 16 * len(run.header.ranks)
    if "megatron" in name:
        reason = "Megatron's own timers, which have no step"
        assert problems == [
            f"line 3: {reason}", f"line 6: {reason}", f"line 9: {reason}",
            f"5 more lines: {reason}", "8 lines were skipped in all",
        ]  # fmt: skip
    else:
        assert problems == []


def micro(text):
    names = ("step", "fwd", "bwd_inner", "bwd_allreduce", "bwd")
    for name in names:
        text = text.replace(f"{name}:", f"{name}_microstep:")
    return text


def test_accumulation_is_the_number_of_micro_steps(tmp_path):
    text = "\n".join([*[micro(STEP)] * 4, STEP] * 3) + "\n"
    (run,), problems = imported(tmp_path, "a_2gpu.log", text.encode())
    assert problems == []
    assert (run.header.config["accumulation"], run.header.config["global_batch"]) == (4, 128)
    assert training_summary(run).n_samples == 128
    steps, _ = parse_deepspeed_log(STEP + "\n", Path("x"))
    assert accumulation(steps) == 1


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (f"worker-1: [2024-01-01 10:00:00,123] [INFO] [a.py:1:f] [Rank 3] {STEP}", 3),
        (f"[1,2]<stdout>:{STEP}", 2),
        (f"[1,2]<stderr>:[2024-01-01 10:00:00,1] [Rank 1] rank=1 {STEP}", 1),
        (f"0: {STEP}", 0),
        (f"\x1b[36m\x1b[1m[Rank 0] {STEP}\x1b[0m\x1b[K", 0),
        (f"{STEP}Epoch 0:  5%|\u2588\u2588   | 5/743 [00:05<1:02:03, 1.2it/s]", 0),
        (f"{STEP} | 5%|\u2588   | 5/743 [00:05<?, ?it/s]", 0),
        (f"Epoch 0:  5%|\u2588\u2588   | 5/743 [00:05<?, ?it/s]\r{STEP}\rEpoch 0: 6%|", 0),
        (STEP.replace("time (ms) |", "rank=5 time (ms) |"), 5),
        (STEP.replace("time (ms) |", "time (ms) | moe: 1.00 |"), 0),
        (STEP.replace(".", ","), 0),
        (STEP.replace(" bwd_inner", " selective_optimizer_update: 1.00 | bwd_inner"), 0),
    ],
)
def test_marks_of_launchers_and_terminals_change_nothing(line, rank):
    steps, problems = parse_deepspeed_log(f"noise\n{line}\nnoise\n", Path("x"))
    assert problems == []
    (step,) = steps
    assert step.rank == rank
    assert (step.forward_s, step.step_s) == (pytest.approx(0.0601), pytest.approx(0.2093))


def test_thousands_are_told_from_decimals():
    text = STEP.replace("fwd: 60.10", "fwd: 1,060.10").replace("bwd: 140.20", "bwd: 1.140,20")
    (step,), _ = parse_deepspeed_log(text + "\n", Path("x"))
    assert (step.forward_s, step.step_s) == (pytest.approx(1.0601), pytest.approx(2.2093))
    texts = ("1,5", "1,234", "1,234,567.5", "12,34.5", "\u00b2", "nan")
    assert [read_number(text) for text in texts] == [1.5, None, 1234567.5, None, None, None]


@pytest.mark.parametrize(
    "line",
    [
        STEP.replace("9.00", "9.0012/743"),
        STEP.replace("9.00", "1,234"),
        STEP.replace("fwd: 60.10", "fwd: nan"),
        STEP.replace("fwd: 60.10", "fwd: 60.10 | fwd: 60.10"),
        STEP.replace("| bwd: 140.20", "| bwd 140.20"),
        STEP.replace("fwd: 60.10", "fwd: " + "9" * 5000),
        STEP.replace("fwd: 60.10", "fwd: \u0666\u0660.\u0661\u0660"),
        "time (ms) | fwd: 1.00",
    ],
)
def test_a_line_that_could_mean_another_time_is_skipped(line):
    steps, problems = parse_deepspeed_log(f"{STEP}\n{line}\n", Path("x"))
    assert (len(steps), problems) == (1, ["line 2: not fwd, bwd and step in milliseconds"])


def test_lines_of_throughput_are_no_steps_and_said_so(tmp_path):
    text = (
        "[Rank 0] step=10, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]\n"
        "steps: 10 loss: 2.3026 iter time (s): 0.207 samples/sec: 618.4\n"
        "epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=123.4, "
        "CurrSamplesPerSec=120.1, MemAllocated=1.2GB, MaxMemAllocated=2.3GB\n"
    )
    runs, (why,) = imported(tmp_path, "a.log", text.encode())
    assert (runs, why) == ([], f"neither a {' nor '.join(READERS)}")
    steps, problems = parse_deepspeed_log(text + STEP + "\n" + text, Path("x"))
    assert (len(steps), problems) == (1, [])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_both_kinds_are_read_in_the_encodings_of_windows(encoding, tmp_path):
    csv = f"{HEADER}\r\n2024-03-01 10:00:00,0,1,5,0,G,97%,5000\r\n"
    rows, _ = parse_epoch_csv(decode(csv.encode(encoding)), tmp_path)
    assert [row.duration_s for row in rows] == [5.0]
    steps, problems = parse_deepspeed_log(decode(f"{STEP}\r\n".encode(encoding)), tmp_path)
    assert (len(steps), problems) == (1, [])


def rows_of(*lines, header="Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB"):
    return parse_epoch_csv("\n".join([header, *lines]) + "\n", Path("x.csv"))


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("Rank;Epoch;Computation_Time;GPU_ID;GPU_Used_Mem_MB", "1;2;101,5;3;5000"),
        ("Rank;Epoch;Computation_Time;GPU_ID;GPU_Used_Mem_MB", '1;2;"101,5";3;5000,0'),
        ("Rank\tEpoch\tComputation_Time\tGPU_ID\tGPU_Used_Mem_MB", "1\t2\t101.5\t3\t5000"),
        ("Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", '1,2,"101,5",3,5000'),
        ("Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", "1,2,101.5 s,3,5000 MiB"),
        ("Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", "1,2,101500ms,3,4.8828125GB"),
        ("Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", "1,2,0:01:41.5,3,5000,"),
        ("Rank,Epoch,Computation_Time (ms),GPU_ID,GPU_Used_Mem [GiB]", "1,2,101500,3,4.8828125"),
        ("rank, epoch, epoch_time_s, gpu_id, gpu_memory_used_mb", "1, 2, 101.5, 3, 5000"),
        ("Rank,Epoch,Computation_Time,Total_Time,GPU ID,GPU_Used_Mem_MB", "1,2,90,101.5,3,5000"),
        (",Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", "0,1,2,101.5,3,5000"),
        ("Unnamed: 0,Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", "0,1,2,101.5,3,5000"),
        ("Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", '"17",1,2,101.5,3,5000'),
        ("sep=;\nRank;Epoch;Computation_Time;GPU_ID;GPU_Used_Mem_MB", "1;2.0;101.5;3;5000;"),
        ("# by me\nRank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", "1,2,101.5,3,5000"),
        ("Epoch,Computation_Time,Rank,GPU_ID,GPU_Used_Mem_MB", '2,"101.5",1,3,"5,000.0"'),
        ("Rank,Epoch,Computation_Time,GPU_ID,GPU_Used_Mem_MB", "rank1,2,101.5,cuda:3,5000"),
        ("# Rank,Epoch,Epoch_Time,GPU_ID,GPU_Used_Mem_MB", "1.0e+00,2e0,1.015e+02,3.,5E3"),
    ],
)
def test_the_same_row_in_many_spellings(header, line):
    (row,), problems = rows_of(line, header=header)
    assert problems == []
    assert (row.rank, row.epoch, row.duration_s, row.device_id) == (1, 2, 101.5, 3)
    assert row.memory_used_bytes == 5000 * 2**20


@pytest.mark.parametrize("lines", [("0,1,1,5", "1,1,1,6"), ("1,1,1,5", "0,1,1,6")])
def test_a_time_that_a_decimal_comma_divides_is_left_out(lines):
    with pytest.raises(ResultsError, match="2 lines: 4 of 3 columns"):
        rows_of(*lines, header="Rank,Epoch,Epoch_Time")


def test_a_restart_in_the_middle_is_a_repeat(tmp_path):
    lines = [f"{r},{e},{d},{r},5000" for e, d in ((1, 11), (2, 12), (3, 13)) for r in (0, 1)]
    again = [f"{r},{e},{d},{r},5000" for e, d in ((2, 22), (3, 23), (4, 24)) for r in (0, 1)]
    rows, problems = rows_of(*lines, *again)
    assert problems == []
    assert [(r.occurrence, r.epoch, r.duration_s) for r in rows if r.rank == 0] == [
        (0, 1, 11), (0, 2, 12), (0, 3, 13), (1, 2, 22), (1, 3, 23), (1, 4, 24),
    ]  # fmt: skip
    assert [r.occurrence for r in rows if r.rank == 1] == [0, 0, 0, 1, 1, 1]


def test_a_row_for_each_gpu_of_a_rank_is_one_epoch(tmp_path):
    header = "Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Used_Mem_MB,GPU_Total_Mem_MB"
    lines = [f"0,{e},{10 + e},{g},G,{100 + g},8192" for e in (1, 2) for g in (0, 1, 2)]
    (run,), problems = imported(tmp_path, "a.csv", "\n".join([header, *lines, ""]).encode())
    assert problems == []
    assert values(run, "epoch_s") == [11.0, 12.0]
    assert values(run, "memory_used_bytes") == [n * 2**20 for n in (100, 101, 102)] * 2


def test_two_times_of_one_epoch_are_refused_by_line():
    rows, problems = rows_of("0,1,10,0,1", "0,1,11,1,1", "0,2,12,0,1")
    assert [row.duration_s for row in rows] == [10, 12]
    assert problems == ["line 3: a second time for the same rank, epoch and GPU"]


def test_rows_of_validation_are_no_second_training():
    lines = [f"0,{e},{phase},{d}" for e in (1, 2) for phase, d in (("train", 10), ("val", 3))]
    rows, problems = rows_of(*lines, header="Rank,Epoch,Phase,Epoch_Time")
    assert [(row.occurrence, row.epoch, row.duration_s) for row in rows] == [(0, 1, 10), (0, 2, 10)]
    assert problems == [f"line {n}: a phase other than training" for n in (3, 5)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("epoch;epoch_time\n1;5\n", "has no column Rank, only 'epoch, epoch_time': rename or add"),
        ("step,loss\n1,5\n",
         "has no column Rank and no Epoch and no Epoch_Time, only 'step, loss'"),
        ("\n", "is empty"),
    ],
)  # fmt: skip
def test_a_table_of_another_kind_says_what_it_lacks(text, reason, tmp_path):
    runs, (problem,) = imported(tmp_path, "a.csv", text.encode())
    assert (runs, problem.startswith(reason)) == ([], True), problem


def test_parts_of_an_epoch_are_not_taken_for_the_whole():
    with pytest.raises(
        ResultsError, match="computation time and communicationtime, but no column Epoch_"
    ):
        rows_of("0,1,10,5", header="Rank,Epoch,Computation_Time,Communication_Time")
    rows, _ = rows_of("0,1,10,5,16", header="Rank,Epoch,Computation_Time,Comm_Time,Epoch_Time")
    assert rows[0].duration_s == 16


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Total,,24,,", NO_NUMBER),
        ("0,1,10,0,1,2,3", "7 of 5 columns"),
        ("0,1,10", "3 of 5 columns"),
        ("0,-1,10,0,1", NO_NUMBER),
        ("0,1/90,10,0,1", NO_NUMBER),
        ("0,1,10 parsecs,0,1", NO_NUMBER),
        ("\u00b2,1,10,0,1", NO_NUMBER),
        ("0,1,1e999,0,1", NO_NUMBER),
        ("999999999,1,10,0,1", NO_NUMBER),
        ("0,1,inf,0,1", NO_NUMBER),
        ("0,1," + "9" * 5000 + ",0,1", NO_NUMBER),
    ],
)
def test_a_row_that_says_nothing_is_skipped_with_its_reason(line, reason):
    rows, problems = rows_of("0,1,10,0,1", line)
    assert (len(rows), problems) == (1, [f"line 3: {reason}"])


@pytest.mark.parametrize(
    "blank", [" ", "\t", "|", "[", "\x1b[", ",", "(", ":", "time (ms) |", "1,"]
)
def test_a_million_of_anything_is_read_at_once(blank):
    junk = blank * (10**6 // len(blank))
    texts = (
        junk,
        f"time (ms){junk}",
        f"{STEP}{junk}",
        f"Rank,Epoch,Epoch_Time\n0,1,{junk}",
        f"[2024-01-01 {junk}{STEP}",
    )
    for text in texts:
        plain(text)
        is_epoch_csv(text)
        is_deepspeed_log(text)
        for parse in (parse_epoch_csv, parse_deepspeed_log):
            with suppress(ResultsError):
                parse(text, Path("x"))


def test_a_rank_far_above_the_others_is_skipped_and_named():
    line = "2024-03-01 10:0{}:00,{},1,{}"
    lines = ["Timestamp,Rank,Epoch,Computation_Time", line.format(1, 0, 5), line.format(2, 5000, 6)]
    rows, skipped = parse_epoch_csv("\n".join([*lines, ""]), Path("epochs.csv"))
    assert [row.rank for row in rows] == [0]
    assert len(skipped) == 1
    assert FAR_RANK in skipped[0]

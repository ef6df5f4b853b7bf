"""torchtitan's logs: the parts that make a run, and logs that make none."""

import pytest
from made_runs import read_results

from harness.domain.record import Span
from harness.measure.derive.spans import samples_of
from harness.measure.derive.training import training_summary
from harness.plot.imports import ImportFacts, import_logs

HEAD = "[rank{rank}]:[titan] 2026-03-01 10:00:{seconds} - root - INFO - "
SET_UP = [
    "Building 2-D device mesh with ['dp_shard', 'tp'], [2, 2]",
    "CUDA capacity: NVIDIA L4 with 22.00GiB memory",
    "Model llama3 debugmodel size: 6,163,712 total parameters",
    "Applied FSDP to the model",
    "Trainer is initialized with local batch size 8, global batch size 32, gradient accumulation "
    "steps 2, sequence length 128, total steps 30 (warmup 2)",
]


def metrics(step, seconds, loss="7.5000", rank=0):
    head = HEAD.format(rank=rank, seconds=seconds)
    return (
        f"{head}step: {step:2}  loss: {loss:>8}  grad_norm:  1.4604  memory:  1.50GiB(6.82%)  "
        "tps: 5,756  tflops: 0.41  mfu: 0.04%"
    )


def log(*lines, set_up=SET_UP):
    head = HEAD.format(rank=0, seconds="00,000")
    return "".join(f"{line}\n" for line in (*(head + line for line in set_up), *lines))


def imported(tmp_path, text):
    path = tmp_path / "titan.log"
    path.write_text(text)
    _, problems = import_logs([path], tmp_path / "results", ImportFacts(dtype="bf16"))
    return read_results(tmp_path / "results").runs, [reason for _, reason in problems]


def steps_of(run):
    return [r for r in run.ranks[0] if isinstance(r, Span)]


@pytest.mark.parametrize(
    ("mesh", "applied", "batch", "strategy"),
    [
        ("1-D device mesh with ['tp'], [2]", "Applied Tensor Parallelism", 8, "tp=2"),
        ("1-D device mesh with ['dp_shard'], [2]", "Applied FSDP to the model", 16, "fsdp"),
        ("0-D device mesh with [], []", "Applied compile", 8, "single"),
    ],
)
def test_the_strategy_is_what_the_log_says_was_applied(tmp_path, mesh, applied, batch, strategy):
    trainer = (
        f"Trainer is initialized with local batch size 8, global batch size {batch}, gradient "
        "accumulation steps 1, sequence length 128, total steps 30 (warmup 2)"
    )
    set_up = [f"Building {mesh}", *SET_UP[1:3], applied, trainer]
    lines = metrics(1, "02,000"), metrics(10, "06,500")
    (run,), _ = imported(tmp_path, log(*lines, set_up=set_up))
    assert run.header.config["strategy"] == strategy


def test_lines_become_steps_and_the_header_has_what_the_log_names(tmp_path):
    lines = metrics(1, "02,000"), metrics(10, "06,500", "6.25"), metrics(20, "11,500", "\x1b[0m5.0")
    (run,), problems = imported(tmp_path, log(*lines, *lines))
    assert problems == []
    config = run.header.config
    assert (config["model"], config["strategy"]) == ("llama3 debugmodel", "dp_shard=2,tp=2")
    assert (config["global_batch"], config["batch_per_device"], config["dtype"]) == (32, 8, "bf16")
    assert [info.device_kind for info in run.header.ranks] == ["NVIDIA L4"] * 4
    assert len(run.header.cluster.nodes) == 1
    assert [(span.step, span.duration_s) for span in steps_of(run)] == [(10, 0.5), (20, 0.5)]
    assert [sample.value for sample in samples_of(run.ranks[0], "loss")] == [7.5, 6.25, 5.0]
    summary = training_summary(run)
    assert summary.throughput == pytest.approx(64)
    assert summary.tokens_per_s == pytest.approx(64 * 128)
    assert summary.ranks[0].memory_bytes == {"reserved": 1.5 * 2**30}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (log(metrics(1, "02,000"), metrics(2, "03,000"), set_up=SET_UP[:4]), "from its beginning"),
        (log(metrics(1, "02,000")), "no two metric lines of rank 0 with times"),
        (log("no metric line"), "torchtitan metric lines"),
        (log(metrics(1, "02,000", rank=99999)), "lines of ranks above 16383 alone"),
    ],
)
def test_a_log_that_makes_no_run_is_refused(tmp_path, text, reason):
    runs, problems = imported(tmp_path, text)
    assert list(runs) == []
    assert [reason in problem for problem in problems] == [True]


def test_lines_out_of_order_are_named(tmp_path):
    lines = metrics(5, "02,000"), metrics(3, "03,000"), metrics(4, "03,000"), metrics(6, "05,000")
    (run,), problems = imported(tmp_path, log(*lines))
    assert [span.step for span in steps_of(run)] == [6]
    assert problems == [
        "line 7: its step does not follow that of the line before",
        "line 8: it has no time after that of the line before",
    ]

"""The command line: what it teaches, what it refuses, and what it leaves behind."""

import platform
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from launching import ROOT, completed, entry
from made_runs import header_of, local_header, read_results

from harness import __main__ as program
from harness.__main__ import _differing, _flags, _preloaded, main
from harness.cases import Case, plan_runs
from harness.command_line import parse_all
from harness.errors import ConfigError, HarnessError, StrategyError
from harness.measure.store import write_header
from harness.runtime.ranks.host import read_settings
from harness.workloads import load_workload
from harness.workloads.common.contract import config_json
from harness.workloads.train.cases import train_cases


def test_help_does_not_wait_for_torch():
    code = (
        "import sys\nfrom harness.__main__ import main\n"
        "try: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("rank", "level"), [("0", "INFO"), ("1", "ERROR")])
def test_rank_0_alone_warns_of_the_model(rank, level):
    code = (
        "import logging\nfrom harness.__main__ import main\n"
        "try: main(['--help'])\nfinally:\n"
        " level = logging.getLogger('harness.runtime.capture.capture').getEffectiveLevel()\n"
        " print(logging.getLevelName(level))"
    )
    launched = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"}
    done = completed(sys.executable, "-c", code, cwd=ROOT, **launched)
    assert done.stdout.splitlines()[-1] == level


def test_ctrl_c_before_anything_runs_ends_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("import os, time\nos.kill(os.getppid(), 2)\ntime.sleep(60)")
    done = entry("matmul", "--results", tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_help_begins_with_the_flags_of_the_workload_itself_in_whole_paragraphs(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    places = [shown.index(f"--{flag} ") for flag in ("strategy", "data", "model", "dlrm-lookups")]
    assert places == sorted(places)
    assert "None" not in shown
    plain = " ".join(re.sub("[│\n]", " ", shown).split())
    assert "32 for each rank, and single trains it too. --schedule" in plain


def refused(*words):
    """The error of a command line that no run is made by."""
    with pytest.raises(HarnessError) as caught:
        main([*map(str, words)])
    return str(caught.value)


@pytest.mark.parametrize("workload", ["links", "matmul"])
def test_ranks_must_not_wait_longer_for_a_sample_than_for_a_collective(workload):
    said = refused(workload, "--time-budget-s", "30", "--collective-timeout-s", "20")
    assert re.search(r"--time-budget-s 30 is longer .* 20: lower the first", said)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("matmull", "there is no workload 'matmull': choose one of matmul, links"),
        ("train --strategy --steps 2", "--strategy has no value: give one or more"),
        ("matmul --sizes", "--sizes has no value"),
        # Old spellings, and those of other programs.
        ("matmul --dtypes fp32", "--dtypes is --dtype here"),
        ("train --rank_counts=2", "--rank-counts is --n-ranks here"),
        ("links --min-iterations 3", "--min-iterations is --min-samples here"),
        ("train --lr 0.1", "--lr is --learning-rate here"),
        ("train --stpes 5", "unknown flags or values: --stpes, 5: perhaps --steps or"),
        ("control", "RUN and --strategy PATH must be given; see entry.sh control --help"),
        ("control r --strategy s --timeout-s nan", "--timeout-s nan must be above 0, and finite"),
        ("control results/a", "--strategy PATH must be given; see"),
        ("train --steps abc", "--steps: no whole number: 'abc'; see entry.sh train --help"),
        ("train --learning-rate x", "--learning-rate: no number: 'x'; see"),
        ("matmul --sizes a", "--sizes: these cannot be read: ['a']; see"),
        ("matmul --results=", "--results has an empty value: give one, or drop it"),
        ("--results=", "--results has an empty value"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_in_one_line(words, told):
    said = refused(*words.split())
    assert said.startswith(told)
    assert "\n" not in said


def test_help_has_no_colours_on_the_terminal_that_mpirun_gives_a_rank(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(SystemExit):
        main(["matmul", "--help"])
    assert "\x1b" not in capsys.readouterr().out


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path, capsys):
    results = tmp_path / "results"
    assert main(["--dry-run", "--results", str(results)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"[1/{len(lines)}] matmul")
    assert any("strategy=single" in line for line in lines)
    with pytest.raises(StrategyError, match=r"strategy file missing\.json: No such file"):
        main(["train", "--strategy", "missing.json", "--dry-run", "--results", str(results)])
    assert not results.exists()


def test_runs_of_a_sweep_are_told_apart_in_the_dry_run_and_in_the_log(tmp_path, capsys):
    words = ["train", "--strategy", "single", "ddp", "--batch-size", "32", "64", "--results"]
    assert main([*words, str(tmp_path), "--dry-run"]) == 0
    lines = sorted(line[6:] for line in capsys.readouterr().out.splitlines())
    batches = [f"strategy={name} batch={n}" for name in ("ddp", "single") for n in (32, 64)]
    assert lines == [f"train model=resnet18 {words}" for words in batches]
    *_, (_, config, _) = parse_all([*words, str(tmp_path)])
    load = partial(Case, name="train", workload=load_workload("train"))
    cases = [load(config=one) for one in train_cases(config, 1)]
    ranks = local_header(["a"]).ranks
    titles = sorted(plan.title.partition(" (")[0] for plan in plan_runs(cases, ranks))
    assert titles == [f"train resnet18 {s} batch {n}" for s in ("ddp", "single") for n in (32, 64)]


def test_flags_of_a_launch_hold_for_all_its_workloads():
    words = "matmul --results R + train --run_timeout_s=7 + links --resume --results R"
    matmul, train, links = parse_all(words.split())
    assert matmul.options == train.options == links.options
    shared = matmul.options
    assert (str(shared.results), shared.run_timeout_s, shared.resume) == ("R", 7.0, True)
    refused = "--results is R for matmul and S for train, which run in one launch: give it once"
    with pytest.raises(ConfigError, match=refused):
        parse_all(["matmul", "--results", "R", "+", "train", "--results", "S"])


def test_a_dry_run_tells_first_what_neighbouring_runs_build_on(tmp_path, capsys):
    words = "train --strategy pipeline searched --microbatches auto 4 --repeats 2 --dry-run"
    assert main([*words.split(), "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    needs = [line.split()[5] for line in lines if "before it" in line]
    assert needs == ["profile", "search"]
    assert all("before it" in line for line in lines[:2])
    assert len(lines) == 2 + 6


def test_a_resumed_dry_run_says_which_runs_are_done(tmp_path, capsys, monkeypatch):
    words = ["train", "--strategy", "single", "ddp", "--dry-run", "--resume", "--results"]
    *_, (_, config, _) = parse_all([*words, str(tmp_path)])
    case = next(case for case in train_cases(config, 1) if case.strategy == "ddp")
    values = {"config": config_json(case), "status": "ok", "info": {"settings": read_settings({})}}
    header = header_of([platform.node()], workload="train", **values)
    write_header(tmp_path / header.run_id, header)
    assert main([*words, str(tmp_path)]) == 0
    lines = [line.partition(";")[0][6:] for line in capsys.readouterr().out.splitlines()]
    assert sorted(lines) == [f"train is done: {header.run_id}", "train would run"]
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert main([*words, str(tmp_path)]) == 0
    assert "is done" not in capsys.readouterr().out


def test_other_ranks_leave_usage_errors_to_rank_0():
    launched = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    done = completed(sys.executable, "-m", "harness", "matmull", cwd=ROOT, **launched)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("local_rank", "n_lines"), [("0", 1), ("1", 0)])
def test_without_mpi_one_rank_of_each_host_says_what_it_refuses(local_rank, n_lines):
    """Rank 0 does not hear of it: this host may lack the user's model, or have other flags."""
    of_torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "WORLD_SIZE": "4"}
    launched = of_torchrun | {"RANK": "3", "LOCAL_RANK": local_rank}
    done = completed(sys.executable, "-m", "harness", "matmull", cwd=ROOT, **launched)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", n_lines)
    assert done.stderr.startswith("error: there is no workload 'matmull'"[: 99 * n_lines])


@pytest.mark.parametrize(("flag", "place"), [("--steps=1", "taken"), ("--dry-run", "taken/new")])
def test_results_that_cannot_be_written_are_said(tmp_path, flag, place):
    (tmp_path / "taken").touch()
    results = tmp_path / place
    said = refused("train", "--model", "lenet", flag, "--results", results)
    assert said.startswith(f"--results {results} cannot be written on ")
    assert said.endswith("(Not a directory): give a directory that you may write to")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("unwritten.nets:small", "No module named 'unwritten'; start in the directory that holds"),
        ("dry_nets:none", "dry_nets.py has no callable 'none': name a function that it defines"),
        ("dry_broken:small", "ValueError: no flag (dry_broken.py:1 in <module>)"),
    ],
)
def test_a_dry_run_refuses_a_users_model_that_cannot_be_imported(
    tmp_path, monkeypatch, model, message
):
    (tmp_path / "dry_nets.py").touch()
    (tmp_path / "dry_broken.py").write_text("raise ValueError('no flag')")
    monkeypatch.syspath_prepend(tmp_path)
    for workload in ("train", "profile"):
        said = refused(workload, "--model", model, "--dry-run", "--results", tmp_path)
        assert said.startswith(f"--model {model!r}: ")
        assert message in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --model unwritten.nets:small",
         "--model 'unwritten.nets:small': No module named 'unwritten'; start in"),
        ("links --cluster-file {dir}", "--cluster-file {dir} cannot be written (Is a directory): "),
        ("profile --profile-file {dir}/taken/a.json",
         "--profile-file {dir}/taken/a.json cannot be written (Not a directory): "),
        ("train --model lenet --strategy {dir}/none/plan.json",
         "strategy file {dir}/none/plan.json: No such file"),
        ("train --model lenet --data imagefolder --data-dir {dir}/none",
         "{dir}/none holds no class"),
        ("train --model lenet --engine executor --load-state {dir}/none",
         "{dir}/none holds no shard*.safe"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_written_is_said_before_anything_runs(tmp_path, words, message):
    (tmp_path / "taken").touch()
    words = words.format(dir=tmp_path).split()
    said = refused(*words, "--results", tmp_path / "results")
    assert said.startswith(message.format(dir=tmp_path))
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize("words", [["profile"], ["search"], ["train", "--strategy", "pipeline"]])
def test_a_damaged_profile_is_refused_before_anything_runs(tmp_path, words):
    (tmp_path / "profile-lenet.json").write_text('{"schema": ')
    said = refused(*words, "--model", "lenet", "--results", tmp_path)
    assert said.startswith(f"{tmp_path / 'profile-lenet.json'} is not JSON in line 1, ")
    assert said.endswith(": restore the file, or remove it to measure again")
    assert len(list(tmp_path.iterdir())) == 1


def test_one_rank_trains_and_its_results_can_be_read(tmp_path):
    done = entry("train", "--model", "lenet", "--steps", "3", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path)
    assert results.skipped == []
    (run,) = results.runs
    assert run.header.status == "ok"
    assert sum(getattr(r, "kind", "") == "step" for r in run.ranks[0]) == 3


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        ("resnet18", ["torchvision"]), ("mine:factory", ["torchvision"]), ("dlrm", []),
        ("theirs.gpt:factory", ["torchvision", "transformers"]), ("lenet", []), ("", []),
    ],
)  # fmt: skip
def test_libraries_are_imported_once_for_the_models_that_may_need_them(
    model, needed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "gpt.py").write_text("from transformers import GPT2Config")
    config = SimpleNamespace(model=model) if model else SimpleNamespace()
    found = _preloaded([SimpleNamespace(name="train", config=config)])
    prefix = "harness.runtime.models.preload_"
    assert [name.removeprefix(prefix) for name in found if name.startswith(prefix)] == needed
    assert "harness.workloads.train.workload" in found


def test_later_runs_have_the_memory_that_links_had_of_a_gpu(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("let go"))
    flags = ["--measure", "collectives", "--operations", "all_reduce", "--sizes", "1KiB"]
    assert main(["links", *flags, "--results", str(tmp_path)]) == 0
    assert told == ["let go"]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ("train --steps 4", "rank 0 has train --steps 3, rank 1 train --steps 4: start all with"),
        ("train --steps 3 + links", "rank 0 has no such workload, rank 1 links --operations ("),
        ("train --steps 3 --data-dir d", ""),
    ],
)
def test_ranks_with_other_flags_are_named_by_the_first(others, message):
    flags = [_flags(parse_all(words.split())) for words in ("train --steps 3", others)]
    found = _differing(flags)
    assert found.startswith(message) if message else not found


def test_ranks_without_mpi_compare_their_flags_when_they_have_met(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    of_torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    flags = "matmul", "--results", tmp_path / "results", "--sizes"

    def start(rank, size):
        return entry(*flags, size, **of_torchrun, MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank)

    with ThreadPoolExecutor() as ranks:
        first, second = ranks.map(start, ("0", "1"), (64, 128))
    said = "rank 0 has matmul --sizes (64,), rank 1 matmul --sizes (128,)"
    assert first.returncode == 2
    assert f"error: {said}: start all with the same flags\n" in first.stderr
    assert (second.returncode, second.stderr) == (0, "")
    assert not (tmp_path / "results").exists()


def test_tables_that_find_no_room_are_missed_aloud_but_not_those_that_nobody_reads(
    monkeypatch, caplog
):
    monkeypatch.setattr(program.errors, "drop_output", lambda: None)
    for error in (BrokenPipeError(), OSError(28, "No space left on device")):
        monkeypatch.setattr(program, "_print_tables", Mock(side_effect=error))
        program._print_results([], Path("r"), has_report=True)
    (said,) = caplog.messages
    assert said.endswith("No space left on device): results are in r")


@pytest.mark.parametrize("words", ["--help", "links --help", "control --help", "links --dry-run"])
def test_a_full_disk_under_the_output_is_said_in_one_line(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        said = refused(*words.split())
    assert said == "the output cannot be written: [Errno 28] No space left on device"

"""A run whose writer died reads as a crash; one that is being written does not."""

import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from made_runs import header_of, read_results
from waiting import wait_until

from harness.cases import finished_repeats, warn_of_other_launch
from harness.measure import heartbeat
from harness.measure.heartbeat import HEARTBEAT_FILE, Heartbeat, find_dead_writer
from harness.measure.store import read_header, write_header

HEADER = header_of()


@pytest.fixture
def run_dir(tmp_path):
    write_header(tmp_path / "run", HEADER)
    return tmp_path / "run"


def age(path, seconds):
    at_s = path.stat().st_mtime - seconds
    os.utime(path, (at_s, at_s))


def test_a_run_that_is_being_written_is_running(run_dir):
    with Heartbeat(run_dir, period_s=0.02):
        age(run_dir / "run.json", 3600)
        time.sleep(0.1)
        assert read_header(run_dir).status == "running"
    assert not (run_dir / HEARTBEAT_FILE).exists()


def test_every_beat_renews_the_file_and_writes_it_again_where_it_is_missing(run_dir):
    path = run_dir / HEARTBEAT_FILE
    with Heartbeat(run_dir, period_s=0.02):
        path.unlink()
        wait_until(path.exists)
        first_s = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns > first_s)
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_writer_that_was_killed_on_this_host_is_dead_at_once(run_dir, caplog):
    program = (
        "import sys, time, pathlib; from harness.measure.heartbeat import Heartbeat\n"
        "with Heartbeat(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(run_dir)], stdout=subprocess.PIPE, text=True
    )
    writer.stdout.readline()
    assert find_dead_writer(run_dir) == ""
    warn_of_other_launch(run_dir.parent, HEADER.ranks)
    assert f"another launch measures on node0 now ({HEADER.run_id})" in caplog.text
    caplog.clear()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    warn_of_other_launch(run_dir.parent, HEADER.ranks)
    assert caplog.text == ""
    header = read_header(run_dir)
    assert header.status == "crash"
    assert f"rank 0 on {os.uname().nodename}) died without closing it" in header.reason
    (run,) = read_results(run_dir.parent).runs
    assert run.header.status == "crash"
    assert finished_repeats(run_dir.parent) == {}  # --resume carries it out


@pytest.mark.parametrize(("settings", "n_repeats"), [
    ({"kernel": "6.1", "NCCL_ALGO": "Ring"}, 1), ({"kernel": "6.1"}, 0), ({}, 1),
])  # fmt: skip
def test_resume_counts_no_copy_and_no_run_of_other_variables(settings, n_repeats, tmp_path):
    own = {"kernel": "6.8", "NCCL_ALGO": "Ring"}
    for name in ("run", "copy"):
        write_header(tmp_path / name, header_of(status="ok", info={"settings": own}))
    ranks = header_of(info={"settings": settings}).ranks
    assert len(finished_repeats(tmp_path, ranks).get("key", [])) == n_repeats


def test_resume_warns_of_a_run_that_it_cannot_read(run_dir, caplog):
    (run_dir / "run.json").write_text('{"schema": "harness-run", "version": 1}')
    assert finished_repeats(run_dir.parent) == {}
    assert "--resume passes over a run: " in caplog.text
    assert "version 1, this harness reads harness-run version" in caplog.text


# A clock that was set back leaves beats of the future, which no writer that lives renews.
@pytest.mark.parametrize(("age_s", "is_dead"), [(20, False), (40, True), (-3600, True)])
def test_a_writer_on_another_host_is_dead_after_fifteen_missed_beats(run_dir, age_s, is_dead):
    path = run_dir / HEARTBEAT_FILE
    writer = {"hostname": "far", "pid": 1, "start": "1", "process_table": "x", "period_s": 2.0}
    path.write_text(json.dumps(writer))
    age(path, age_s)
    assert bool(find_dead_writer(run_dir)) == is_dead


def test_ages_are_by_the_clock_of_the_file_system(run_dir, monkeypatch):
    (run_dir / HEARTBEAT_FILE).write_text('{"hostname": "far", "period_s": 2.0}')
    monkeypatch.setattr(heartbeat.time, "time", lambda: 4e9)  # this host's clock is wrong
    assert find_dead_writer(run_dir) == ""


def test_a_pipe_in_place_of_a_heartbeat_is_none(run_dir):
    os.mkfifo(run_dir / HEARTBEAT_FILE)
    assert read_header(run_dir).status == "running"


def test_a_closed_run_keeps_its_status_whatever_lies_beside_it(run_dir):
    write_header(run_dir, msgspec.structs.replace(HEADER, status="ok"))
    age(run_dir / "run.json", 3600)
    (run_dir / HEARTBEAT_FILE).write_text("{}")
    assert read_header(run_dir).status == "ok"

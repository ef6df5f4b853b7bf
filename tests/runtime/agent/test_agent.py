"""An agent passes everything through, ends what its program leaves, and closes the row."""

import json
import os
import signal
import subprocess
import sys

import pytest
from launching import ROOT
from waiting import is_alive, wait_until

from harness.measure.store import find_runs
from harness.runtime.agent import ended, family
from harness.runtime.agent.ended import OpenRun

AGENT = [sys.executable, "-SP", str(ROOT / "harness/runtime/agent/__main__.py")]


def start(*argv, **options):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    return subprocess.Popen(
        [*AGENT, *map(str, argv)],
        env={**environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*argv, **options):
    process = start(*argv, **options)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_exit_code_output_and_arguments_pass_through(code):
    script = 'printf "<%s>" "$@"; echo oh >&2; exit $CODE'
    argv = ["env", f"CODE={code}", "sh", "-c", script, "sh", "a b", "--name"]
    assert run(*argv) == (code, "<a b><--name>", "oh\n")


def test_a_program_that_is_not_there_is_said():
    said = "error: /nowhere/program: No such file or directory\n"
    assert run("/nowhere/program") == (127, "", said)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_agent_dies_of_what_its_program_died_of_and_says_so(number):
    code, _, err = run("sh", "-c", f"kill -{int(number)} $$")
    assert code == -number
    host = os.uname().nodename
    assert err == f"error: rank 0 ({host}): its first process was killed by {number.name}\n"


def test_a_first_process_that_dies_before_the_ranks_meet_has_a_row(tmp_path):
    flags = ("--strategy", "ddp", "single", "--freeze", "schedule", f"--results={tmp_path}")
    code, _, err = run("sh", "-c", "kill -9 $$", "harness", "train", *flags)
    assert code == -signal.SIGKILL
    ((run_dir, header),) = find_runs(tmp_path)[0]
    reason = f"rank 0 ({os.uname().nodename}): its first process was killed by SIGKILL"
    assert err == f"error: {run_dir.name}: crash: {reason}\n"
    assert (header.status, header.reason) == ("crash", f"{reason}; no run was open")
    assert (header.workload, header.config["strategy"]) == ("train", "ddp single")
    assert [path.name for path in run_dir.iterdir()] == ["run.json"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_are_passed_on(number):
    script = f"trap 'echo caught; exit 7' {int(number)}; echo ready; while :; do sleep 0.05; done"
    # Under nohup, SIGHUP is ignored.
    process = start("sh", "-c", script, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "caught\n")


def test_what_nohup_ignores_stays_ignored():
    deaf = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = start("sh", "-c", "echo ready; sleep 1; exit 3", **deaf)
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 3


def test_processes_of_a_program_that_failed_end_also_stopped_and_orphaned_ones():
    # The inner shell leaves an orphan in a session of its own.
    orphans = "(setsid sh -c 'kill -STOP $$' & setsid sleep 600 & echo $!)"
    script = f"{orphans}; sleep 600 & echo $!; kill -9 $$"
    process = start("sh", "-c", script)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not any(is_alive(int(pid)) for pid in out.split()))


def test_the_program_dies_with_its_agent():
    process = start("sh", "-c", "echo $$; sleep 600")
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(pid))


PROGRAM = """
import os, signal, sys, time
from harness.runtime.agent.wire import Channel
channel = Channel.from_environment()
channel.begin_run("run1", sys.argv[1], float(sys.argv[3]), is_isolated=False)
print("begun", flush=True)
channel.end_part("run1")
if sys.argv[2] == "close":
    channel.end_run(); channel.close_run(); channel.leave()
elif sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "exit":
    sys.exit(3)
else:
    time.sleep(600)
"""


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "reason": "", "x": 1}))
    (tmp_path / "rank0.jsonl").write_text('{"kind":"step"}\n{"kind":"data"}\n')
    return tmp_path


def program(run_dir, what, timeout_s=600.0, **options):
    return start(sys.executable, "-c", PROGRAM, run_dir, what, timeout_s, **options)


@pytest.mark.parametrize(
    ("what", "timeout_s", "code", "status", "reason"),
    [
        ("kill", 600, -9, "crash", "its first process was killed by SIGKILL"),
        ("exit", 600, 3, "crash", "its first process ended with exit code 3"),
        ("hang", 1, 1, "timeout", "not done after 1 s"),
    ],
)
def test_a_run_that_its_program_leaves_open_is_closed(
    run_dir, what, timeout_s, code, status, reason
):
    process = program(run_dir, what, timeout_s)
    process.communicate(timeout=60)
    assert process.returncode == code
    header = json.loads((run_dir / "run.json").read_text())
    assert (header["status"], header["x"]) == (status, 1)
    assert reason in header["reason"]
    assert header["reason"].endswith("; recorded: rank0 2 records (1 steps)")
    assert header["duration_s"] >= 0
    assert sorted(path.name for path in run_dir.iterdir()) == ["rank0.jsonl", "run.json"]


def test_what_was_recorded_stands_in_the_first_line_of_a_reason(run_dir):
    run = OpenRun(run_dir, 10.0)
    run.close("oom", "rank 1 (b): no memory\nTraceback", 12.5)
    header = json.loads((run_dir / "run.json").read_text())
    told = "rank 1 (b): no memory; recorded: rank0 2 records (1 steps)\nTraceback"
    assert (header["reason"], header["status"], header["duration_s"]) == (told, "oom", 2.5)


def test_a_run_that_its_program_closes_is_left_alone(run_dir):
    before = (run_dir / "run.json").read_text()
    process = program(run_dir, "close")
    assert process.wait(60) == 0
    assert (run_dir / "run.json").read_text() == before
    assert not (run_dir / "heartbeat").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_is_closed_before_the_launcher_kills(run_dir, number):
    # Shells ignore SIGINT in their background jobs.
    is_heard = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL)}
    process = program(run_dir, "hang", **is_heard)
    process.stdout.readline()
    wait_until((run_dir / "heartbeat").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "interrupted: by Ctrl-C or SIGTERM, --resume runs it again" in errors
    header = json.loads((run_dir / "run.json").read_text())
    assert header["status"] == "interrupted"
    assert header["reason"].startswith("by Ctrl-C or SIGTERM, --resume runs it again; ")


def test_ctrl_c_after_all_ranks_have_met_leaves_no_row_of_a_start(tmp_path, monkeypatch):
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    script = """
import socket, time
from harness.runtime.agent.wire import Channel
Channel.from_environment().meet(socket.create_server(("", 0)), 0, ["a", "b"], "token", 30.0)
print("met", flush=True)
time.sleep(600)
"""
    words = ("harness", "train", f"--results={tmp_path}")
    process = start(sys.executable, "-c", script, *words)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert not list(tmp_path.iterdir())


def test_a_row_of_a_start_is_never_running_because_its_launcher_may_kill_at_any_time(tmp_path):
    argv = ["harness", "train", f"--results={tmp_path}"]
    run_dir = ended.write_start(argv, ended.Fault("crash", "stopped\nTraceback"))
    ((found, header),) = find_runs(tmp_path)[0]
    wanted = ("crash", "stopped; no run was open\nTraceback", 0.0)
    assert (found, header.status, header.reason, header.duration_s) == (run_dir, *wanted)


def test_a_wait_before_all_ranks_have_met_does_not_count_as_frozen():
    script = """
import socket, time
from harness.runtime.agent.wire import Channel
time.sleep(1)
channel = Channel.from_environment()
channel.meet(socket.create_server(("", 0)), 0, ["a"], "token", 0.8)
time.sleep(0.1)
channel.leave()
"""
    assert run(sys.executable, "-c", script) == (0, "", "")


def test_a_first_process_that_the_kernel_killed_for_memory_is_told_with_its_limit(monkeypatch):
    monkeypatch.setattr(ended, "n_oom_kills", lambda: 3)
    monkeypatch.setattr(ended, "cgroup_memory_bytes", lambda: 150 << 20)
    killed = "the kernel killed its first process: the memory limit of 150 MiB was reached"
    assert ended.fault_of("rank 1 (b)", -9, 2) == ("oom", f"rank 1 (b): {killed}", (), 137)
    assert ended.fault_of("rank 1 (b)", -11, 2).status == "crash"
    reason = "rank 1 (b): its first process was killed by SIGKILL"
    assert ended.fault_of("rank 1 (b)", -9, 3).reason == reason


def test_the_connections_of_a_launcher_are_found_and_seen_to_end():
    script = """
sleeper() { exec -a "$1" "$PYTHON" -c "import time; time.sleep(600)" "${@:2}"; }
sleeper ssh -x me@node1.lan 'orted --tree node2' &
sleeper ssh node3 orted &
sleeper ping node2 &
echo $$; wait
"""
    env = {**os.environ, "PYTHON": sys.executable}
    launcher = subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout.readline() == f"{launcher.pid}\n"
        wait_until(lambda: len(family._ssh_processes(launcher.pid)) == 2)
        found = family._connections(launcher.pid, ["node1", "node2", "node3.lan"])
        assert list(found) == ["node1", "node3.lan"]
        assert all(map(family.is_connected, found.values()))
        os.kill(found["node1"], signal.SIGKILL)
        wait_until(lambda: not family.is_connected(found["node1"]))
        assert family.is_connected(found["node3.lan"])
    finally:
        family.kill_descendants(launcher.pid)
        launcher.kill()
        launcher.communicate()

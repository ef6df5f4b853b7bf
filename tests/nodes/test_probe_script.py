"""probe.sh itself, under every POSIX shell that this machine has."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launching import write_program
from waiting import wait_until

from harness.nodes.parse import parse_facts, split_sections
from harness.nodes.probe import Order, script
from harness.nodes.ssh import remote_text

SHELLS = [s for s in (["dash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(s[0])]


def order(tmp_path, **changes):
    values = {"peers": ("localhost",), "env_dir": str(tmp_path / "env"), "repo_dir": "/no/repo"}
    return Order(**{**values, "timeout_s": 10.0, **changes})


def run_probe(text, shell, path=None):
    env = {**os.environ, "PATH": path or os.environ["PATH"]}
    command = [shutil.which(shell[0]) or shell[0], *shell[1:], "-s"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS, ids=lambda argv: argv[0])
def test_the_probe_runs_clean_and_its_facts_are_this_machines(shell, tmp_path):
    facts = parse_facts(run_probe(script(order(tmp_path)), shell))
    assert facts.hostname == os.uname().nodename
    assert facts.n_cores == len(os.sched_getaffinity(0))
    assert facts.kernel.startswith("Linux ")
    assert facts.memory_total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.disks
    assert "lo" in [interface.name for interface in facts.interfaces]
    assert facts.environment == ""


def test_this_environments_packages_are_read_without_importing_them(tmp_path):
    start = run_probe(script(order(tmp_path, env_dir=sys.prefix)), ["sh"])
    python = parse_facts(start).python
    assert python.version == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in python.packages


def test_an_environment_whose_python_is_elsewhere_says_where(tmp_path):
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to("/opt/none/bin/python3.11")
    (tmp_path / "env" / "pyvenv.cfg").write_text("home = /opt/none/bin\nversion = 3.11.7\n")
    facts = parse_facts(run_probe(script(order(tmp_path)), ["sh"]))
    assert (facts.environment, facts.python_home) == ("", "/opt/none/bin")


def test_hostile_values_stay_values(tmp_path):
    evil = f"'; touch {tmp_path}/pwned; $(touch {tmp_path}/pwned) `touch {tmp_path}/pwned`"
    run_probe(script(order(tmp_path, env_dir=evil, repo_dir=evil)), ["sh"])
    assert not (tmp_path / "pwned").exists()


def fake_bin(tmp_path, **programs):
    """A PATH whose first directory holds the given shell scripts."""
    directory = tmp_path / "bin"
    for name, body in programs.items():
        write_program(directory / name.replace("_", "-"), f"#!/bin/sh\n{body}\n")
    return f"{directory}:{os.environ['PATH']}"


def test_a_hanging_command_costs_its_limit_and_not_the_rest(tmp_path):
    path = fake_bin(tmp_path, df="exec sleep 60")
    start_s = time.monotonic()
    text = run_probe(script(order(tmp_path, timeout_s=5.0)), ["sh"], path)
    assert time.monotonic() - start_s < 10
    assert split_sections(text)["disk"].returncode == 124
    assert parse_facts(text).gpu.driver == ""
    assert text.rstrip().endswith("@harness:end")


def test_a_driver_that_hangs_is_asked_once_so_that_the_probe_ends_in_time(tmp_path):
    path = fake_bin(tmp_path, nvidia_smi=f"echo >>{tmp_path}/asked; exec sleep 60")
    text = run_probe(script(order(tmp_path, timeout_s=5.0)), ["sh"], path)
    assert (tmp_path / "asked").read_text() == "\n"
    assert parse_facts(text).gpu.smi_error == "nvidia-smi did not answer in time"
    assert text.rstrip().endswith("@harness:end")


def test_the_file_system_of_the_checkout_counts_which_holds_the_results(tmp_path):
    path = fake_bin(tmp_path, df='shift; for at; do echo "disk 9 4 5 44% $at"; done')
    facts = parse_facts(run_probe(script(order(tmp_path, repo_dir="/scratch/h")), ["sh"], path))
    mounts = [disk.mount for disk in facts.disks]
    assert mounts == [os.environ["HOME"], "/tmp", "/dev/shm", "/scratch/h"]


def test_the_probe_kills_itself_when_nobody_else_does(tmp_path):
    # Without `timeout`, nothing bounds a single command.
    path = fake_bin(tmp_path, df="exec sleep 20", timeout="exit 127")
    text = "total_s=1\n" + remote_text("probe.sh")
    start_s = time.monotonic()
    process = subprocess.Popen(
        ["sh", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": path}, start_new_session=True,
    )  # fmt: skip
    try:
        process.stdin.write(text)
        process.stdin.close()
        assert process.wait(10) == -signal.SIGKILL
        assert time.monotonic() - start_s < 8
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_a_probe_leaves_no_process_behind(tmp_path):
    process = subprocess.Popen(
        ["sh", "-s"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    process.communicate(script(order(tmp_path)).encode(), timeout=60)
    wait_until(lambda: members(process.pid) == [], 3)


def members(session):
    """The states of a session's processes that still live."""
    argv = ["ps", "-o", "stat=", "-s", str(session)]
    found = subprocess.run(argv, capture_output=True, text=True).stdout.split()
    return [state for state in found if not state.startswith("Z")]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_the_probe_is_shellcheck_clean():
    text = remote_text("probe.sh")
    subprocess.run(["shellcheck", "-s", "sh", "-"], input=text, text=True, check=True)

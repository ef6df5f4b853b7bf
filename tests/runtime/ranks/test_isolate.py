"""A child that is killed, hangs or is stopped costs its own result and nothing else."""

import gc
import multiprocessing
import operator
import os
import re
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from launching import completed

from harness.measure.reached import Reached, ReachedReader
from harness.runtime.ranks.isolate import run_isolated


def isolated(function, *arguments, timeout_s=60.0, peer_failure=lambda: None, grace_s=0.1):
    with closing(ReachedReader()) as reached:
        arguments = [reached.path if a is ReachedReader else a for a in arguments]
        return run_isolated(
            function, tuple(arguments), timeout_s=timeout_s, peer_failure=peer_failure,
            reached=reached, grace_s=grace_s,
        )  # fmt: skip


def test_a_value_comes_back():
    ending = isolated(operator.add, 2, 3)
    assert (ending.status, ending.value) == ("ok", 5)


def start_a_process():
    assert gc.isenabled()
    assert gc.get_freeze_count()
    process = multiprocessing.Process(target=int)
    process.start()
    process.join()
    return process.exitcode


def interpreted(code, *path):
    """Run code in an interpreter of its own."""
    code = f"import test_isolate as here; from harness.runtime.ranks.isolate import *; {code}"
    paths = os.pathsep.join(map(str, (Path(__file__).parent, *path, *sys.path)))
    return completed(sys.executable, "-c", code, PYTHONPATH=paths)


def test_a_child_starts_processes_as_a_data_loader_does():
    """The server must be a fork of this process's first thread, so another interpreter tests it."""
    done = interpreted("start_fork_server([]); print(here.isolated(here.start_a_process).value)")
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(("sent_s", "imported_s"), [(0.0, 0.5), (0.5, 0.0)])
def test_a_server_that_has_ended_is_named(tmp_path, sent_s, imported_s):
    """It ends before or after the first child's data are sent."""
    (tmp_path / "ends.py").write_text(f"import os, time; time.sleep({imported_s}); os._exit(1)")
    (tmp_path / "sends.py").write_text(
        "import time; from multiprocessing import reduction; send = reduction.sendfds\n"
        f"reduction.sendfds = lambda *fds: (send(*fds), time.sleep({sent_s}))"
    )
    code = "import sends; start_fork_server(['ends']); wait_for_fork_server()"
    done = interpreted(code, tmp_path)
    assert "RuntimeError: its process that imports the modules of runs has ended" in done.stderr


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        (signal.raise_signal, signal.SIGKILL, "killed by SIGKILL$"),
        # Perhaps one that had no answer.
        (signal.raise_signal, signal.SIGABRT,
         "killed by SIGABRT.* has no answer within --collective-timeout-s"),
        (os._exit, 7, "ended with exit code 7 and no result"),
    ],
)  # fmt: skip
def test_a_child_that_ends_without_a_result_is_a_crash_with_its_cause(end, code, reason):
    ending = isolated(end, code)
    assert (ending.status, ending.is_aborted) == ("crash", code == signal.SIGABRT)
    assert re.match(reason, ending.reason)


def test_a_hanging_child_is_stopped_at_its_timeout():
    ending = isolated(time.sleep, 600, timeout_s=1.0)
    assert ending.status == "timeout"


def test_a_failed_peer_stops_a_waiting_child():
    ending = isolated(time.sleep, 600, timeout_s=600, peer_failure=lambda: "1 (b) killed")
    assert ending.status == "skipped"
    assert "rank 1 (b) killed" in ending.reason


def reach_and_stop(path):
    writer = Reached(path)
    writer.begin_step(5)
    writer.begin("forward")
    os.kill(os.getpid(), signal.SIGSTOP)


def failed_when_a_child_is_stopped():
    below = psutil.Process().children(recursive=True)
    return "1 (b) waits" if any(p.status() == psutil.STATUS_STOPPED for p in below) else None


def test_a_stopped_child_is_known_with_the_place_that_it_reached():
    failed = failed_when_a_child_is_stopped
    ending = isolated(reach_and_stop, ReachedReader, peer_failure=failed)
    assert ending.status == "skipped"
    assert ending.standstill is not None
    assert (ending.standstill.step, ending.standstill.phase) == (5, "forward")
    assert ending.standstill.is_stopped

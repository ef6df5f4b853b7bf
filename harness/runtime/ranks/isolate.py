"""Run a function in a child process and report how it ended.

A run that is killed (for memory, say) or hangs must cost its own row only, so each run is a child
of a fork server, a fork of the rank's first process that never initializes MPI or CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.util import spawnv_passfds
from typing import Any

import psutil

from harness.errors import flush_output
from harness.measure.reached import ReachedReader, Standstill
from harness.runtime.agent import GRACE_S
from harness.runtime.ranks.cgroup import n_oom_kills

_PR_SET_PDEATHSIG = 1
# Of the 107 bytes of a socket's path, multiprocessing appends 32.
_LONGEST_DIRECTORY = 70
_POLL_S = 0.5

# Longest exit of a child that has given its value; threads may wait for a dead rank.
_EXIT_S = 5.0
_ABORTED = (
    "killed by SIGABRT: stderr says why; where NCCL is used, its watchdog does so when a "
    "collective has no answer within --collective-timeout-s: look at the other ranks' logs, or "
    "raise it"
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a child ended: its value, or the reason for its failure.

    Attributes:
        status: ok, oom (killed by the kernel for memory), crash, timeout or skipped (stopped
            because another rank had failed).
        standstill: the place where the child was stuck, if it was.
        is_aborted: it died of SIGABRT, as NCCL's watchdog ends it when another rank has died.
    """

    status: str
    value: Any = None
    reason: str = ""
    standstill: Standstill | None = None
    is_aborted: bool = False


@contextlib.contextmanager
def _short_directory() -> Iterator[None]:
    """Let multiprocessing choose its directory for sockets: below /tmp if TMPDIR is too long."""
    chosen = tempfile.tempdir
    if len(tempfile.gettempdir()) > _LONGEST_DIRECTORY:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = chosen


def start_fork_server(preload: list[str]) -> None:
    """Fork the server; call before MPI and CUDA are initialized, which do not survive a fork.

    Server and runs share the modules that this process has imported. The server imports the others
    of `preload` before it makes the first child (`wait_for_fork_server`).
    """
    flush_output()  # what is buffered would be written by each process
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    multiprocessing.resource_tracker.ensure_running()
    util: Any = multiprocessing.util
    start_interpreter, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        with _short_directory():
            multiprocessing.forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start_interpreter


def _fork(path: str, argv: Sequence[str], passed_fds: Sequence[int]) -> int:
    """Run an interpreter's command (`python -c COMMAND`) in a fork; returns the fork's pid."""
    if pid := os.fork():
        return pid
    try:
        gc.disable()  # modules stay, and looking for garbage among them takes half a second
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kept = {0, 1, 2, *passed_fds}
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in kept:
                with contextlib.suppress(OSError):  # of the list itself
                    os.close(fd)
        # Its children may start servers, as workers of a DataLoader need: this copy was made while
        # multiprocessing held the lock of the server.
        server: Any = multiprocessing.forkserver
        multiprocessing.util.spawnv_passfds = spawnv_passfds
        server._forkserver.__init__()
        exec(argv[-1], {})
    finally:
        os._exit(0)


def wait_for_fork_server() -> None:
    """Wait for the server's imports, which would disturb a measurement in this process.

    Raises:
        RuntimeError: the server has ended.
    """
    first = multiprocessing.get_context("forkserver").Process(target=int, daemon=True)
    try:
        first.start()
    except (EOFError, ConnectionError):
        raise RuntimeError(
            "its process that imports the modules of runs has ended: it was killed, as for memory, "
            "or a module ended it"
        ) from None
    first.join()


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it has ended."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def begin_collecting() -> None:
    """Collect garbage, but not among what exists: modules, whose pages forked processes share."""
    gc.freeze()
    gc.enable()


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    die_with_parent()
    begin_collecting()
    # Ctrl-C reaches the whole process group, but only the first process may end its child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    value = function(*arguments)
    with contextlib.suppress(BrokenPipeError):  # the first process was killed
        pipe.send(value)
    pipe.close()
    with contextlib.suppress(OSError):  # its reader has gone
        flush_output()


def _failed_ending(exit_code: int | None, oom_kills_before: int) -> Ending:
    if exit_code is not None and exit_code < 0:
        killer = signal.Signals(-exit_code)
        if killer == signal.SIGKILL and n_oom_kills() > oom_kills_before:
            return Ending(status="oom", reason="the kernel killed it: its memory limit was reached")
        is_aborted = killer == signal.SIGABRT
        reason = _ABORTED if is_aborted else f"killed by {killer.name}"
        return Ending(status="crash", reason=reason, is_aborted=is_aborted)
    return Ending(status="crash", reason=f"ended with exit code {exit_code} and no result")


def _stop(process: Any) -> None:
    process.terminate()
    process.join(2.0)
    if process.is_alive():
        process.kill()
        process.join()


def run_isolated(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    timeout_s: float,
    peer_failure: Callable[[], str | None],
    reached: ReachedReader,
    grace_s: float = GRACE_S,
) -> Ending:
    """Call `function(*arguments)` in a child process and wait for it.

    Args:
        function: importable by name; its result must be picklable.
        timeout_s: the child is stopped after this time.
        peer_failure: polled twice a second; returns another rank's failure, after which the child
            is stopped in `grace_s`.
        reached: polled twice a second to find where the child is stuck.
    """
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    kills = n_oom_kills()
    # Not a daemon, so that it may start data loaders. It dies with the fork server, as that does
    # with this process.
    process = context.Process(target=_child, args=(function, arguments, writer), daemon=False)
    process.start()
    writer.close()
    try:
        return _watch(process, reader, kills, timeout_s, peer_failure, reached, grace_s)
    finally:
        if process.is_alive():
            _stop(process)
        reader.close()


def _watch(
    process: Any,
    reader: Connection,
    kills: int,
    timeout_s: float,
    peer_failure: Callable[[], str | None],
    reached: ReachedReader,
    grace_s: float,
) -> Ending:
    deadline_s, give_up_s, failure = time.monotonic() + timeout_s, float("inf"), ""
    while True:
        wait([reader], timeout=_POLL_S)
        if reader.poll():
            standstill = reached.standstill(is_stopped=False)
            try:
                value = reader.recv()
            except EOFError:
                process.join()
                return replace(_failed_ending(process.exitcode, kills), standstill=standstill)
            process.join(_EXIT_S)
            return Ending(status="ok", value=value, standstill=standstill)
        reached.poll()
        now_s = time.monotonic()
        if now_s > min(deadline_s, give_up_s):
            status, reason = "skipped", f"stopped, because rank {failure}"
            if now_s > deadline_s:
                status, reason = "timeout", f"not done after {timeout_s:.0f} s"
            standstill = reached.standstill(is_stopped=_is_stopped(process.pid))
            return Ending(status=status, reason=reason, standstill=standstill)
        if not failure and (found := peer_failure()):
            failure, give_up_s = found, now_s + grace_s


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED  # type: ignore[no-any-return]
    except psutil.Error:
        return False

"""Why a rank's program ended, and the process that connects its agent if the program could not."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

from harness.runtime.agent import CHANNEL_VARIABLE, SEE_OUTPUT
from harness.runtime.agent.peers import Fault
from harness.runtime.ranks.cgroup import UNLIMITED_BYTES, cgroup_memory_bytes, n_oom_kills


def exit_fault(label: str, code: int, why: str) -> Fault:
    """The fault of a program that exited.

    Args:
        label: the rank and its host.
    """
    reason = f"{label}: its first process ended with exit code {code}: {why}"
    return Fault("crash", reason, exit_code=code or 1)


def fault_of(label: str, code: int, oom_kills_before: int) -> Fault:
    """The fault for a program's exit code, or minus its signal.

    Args:
        oom_kills_before: the cgroup's count when the program started.
    """
    if code >= 0:
        return exit_fault(label, code, SEE_OUTPUT)
    exit_code = 128 - code  # the convention of shells and mpirun
    if -code == signal.SIGKILL and n_oom_kills() > oom_kills_before:
        n_bytes = cgroup_memory_bytes()
        limit = f" of {n_bytes / 2**20:.0f} MiB" if n_bytes < UNLIMITED_BYTES else ""
        reason = f"the kernel killed its first process: the memory limit{limit} was reached"
        return Fault("oom", f"{label}: {reason}", exit_code=exit_code)
    reason = f"its first process was killed by {signal.Signals(-code).name}"
    return Fault("crash", f"{label}: {reason}", exit_code=exit_code)


def start_stand_in(argv: Sequence[str]) -> socket.socket:
    """Start a process that initializes MPI and connects this agent to the others.

    Args:
        argv: the command line of the program that died.

    Returns:
        The agent's end of a channel to the process.
    """
    import subprocess  # takes longer than the agent's other modules

    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, "-m", "harness.runtime.ranks.introduction", *argv],
            env={**os.environ, CHANNEL_VARIABLE: str(its.fileno())},
            pass_fds=[its.fileno()],
            stderr=subprocess.DEVNULL,  # the program's end is the error that matters
        )
    mine.setblocking(False)
    return mine

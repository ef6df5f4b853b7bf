"""The agent's loop: forwards signals, watches its rank's program and talks to other agents."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import EXIT_CODE, LaunchError
from harness.runtime.agent import CHECK, GRACE_S, family
from harness.runtime.agent.ended import (
    Deadline,
    OpenRun,
    exit_fault,
    fault_of,
    interruption,
    start_stand_in,
    write_start,
)
from harness.runtime.agent.peers import Fault, Hub, Peers, Spoke, stopped_reason
from harness.runtime.agent.wire import Message, decode
from harness.runtime.ranks.cgroup import n_oom_kills
from harness.runtime.ranks.environment import Launch, read_launch

_LARGEST_MESSAGE = 1 << 17
_SLOWEST_BEAT_S = 2.0
# Below the time between SIGTERM and SIGKILL: a second in Open MPI 4, a fifth of one in Open MPI 5.
_TIME_TO_END_S = {"": 0.5, "prterun": 0.1, "prted": 0.1}
# Longest wait of a rank whose program has died for rank 0 to close the row.
_TIME_TO_CLOSE_S = 5.0
# Longest end of a program that has said why, such as the output of a traceback.
_TIME_TO_FAIL_S = 1.0
_TIME_TO_END_ALL_S = 5.0
# Longest wait for the other ranks to initialize MPI, which they do after importing torch.
_TIME_TO_JOIN_S = 60.0
_TIME_TO_GIVE_UP_S = 2.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


def watch_over(pid: int, channel_fd: int, forwarded: Sequence[signal.Signals]) -> int:
    """Watch a rank's program until it ends; return its exit code, or die of the same signal."""
    agent = RankAgent(pid, socket.socket(fileno=channel_fd), forwarded)
    code = agent.loop()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), -code)
    return code


class RankAgent:
    """The state of one agent; only `loop` changes it, on one thread."""

    def __init__(
        self, pid: int, channel: socket.socket, forwarded: Sequence[signal.Signals]
    ) -> None:
        self._pid = pid
        channel.setblocking(False)
        self._channel: socket.socket | None = channel
        launch: Launch | None = None
        with contextlib.suppress(LaunchError):  # which the program reports
            launch = read_launch(os.environ)
        self._rank, self._size = (launch.rank, launch.size) if launch else (0, 1)
        self._label = f"rank {self._rank} ({os.uname().nodename})"
        self._is_openmpi = launch is not None and launch.launcher == "openmpi"
        self._is_joining = launch is None or not launch.has_mpi
        self._parent = os.getppid()
        self._has_daemon = family.is_daemon(self._parent)
        launcher = family.name_of(self._parent)
        self._time_to_end_s = _TIME_TO_END_S.get(launcher, _TIME_TO_END_S[""])
        self._oom_kills = n_oom_kills()
        self._peers: Peers | None = None
        self._connections: dict[str, int] = {}
        self._limit_s = float("inf")
        self._period_s = _SLOWEST_BEAT_S
        self._stopped_at_s: float | None = None
        self._done = ""
        self._has_left = False
        self._has_begun = False
        self._failure: Fault | None = None
        self._start_s = time.time()
        self._run: OpenRun | None = None
        self._deadline: Deadline | None = None
        self._end_by_s: float | None = None
        self._status: int | None = None
        self._signals: list[int] = []
        self._wake = self._catch(forwarded)

    def _catch(self, forwarded: Sequence[signal.Signals]) -> socket.socket:
        """Install signal handlers that wake the loop; return the socket that it must poll."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wake_end = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in forwarded:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, frame: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        return reader

    def loop(self) -> int:
        """Run until the program ends; return its exit code, or minus its signal."""
        before_s = time.monotonic()
        beat_s = before_s
        while True:
            self._wait(beat_s - time.monotonic())
            now_s = time.monotonic()
            gap_s, before_s, limit_s = now_s - before_s, now_s, self._limit_s
            self._take_signals(now_s)
            self._take_messages(now_s)
            if self._limit_s < limit_s:  # the ranks have met; the wait before had no limit
                gap_s, beat_s = 0.0, now_s
            if self._peers is not None:
                self._peers.receive(now_s)
            self._reap(now_s)
            if self._status is not None:
                return self._program_ended(self._status)
            if (fault := self._judge(gap_s, now_s)) is not None:
                return self._end(fault)
            if now_s >= beat_s:
                self._beat(now_s)
                beat_s = now_s + self._period_s

    def _wait(self, timeout_s: float) -> None:
        poll = select.poll()
        for one in (self._wake, self._channel, *(self._peers.wires() if self._peers else ())):
            if one is not None and one.fileno() >= 0:
                poll.register(one, select.POLLIN)
        if self._end_by_s is not None:
            timeout_s = min(timeout_s, 0.1)
        poll.poll(max(0.0, timeout_s) * 1000)
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _beat(self, now_s: float) -> None:
        if self._peers is not None:
            state: Message = {"done": self._done}
            if self._stopped_at_s is not None:
                state["stopped_s"] = now_s - self._stopped_at_s
            self._peers.beat(state)

    def _take_messages(self, now_s: float) -> None:
        while self._channel is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._channel, _LARGEST_MESSAGE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if data:
                self._take(decode(data), fds, now_s)
            else:  # the program has ended
                self._channel.close()
                self._channel = None

    def _take(self, message: Message, fds: Sequence[int], now_s: float) -> None:
        match message.get("kind"):
            case "joins":
                self._is_joining = True
            case "met":
                self._meet(message, socket.socket(fileno=fds[0]), now_s)
            case "run":
                self._begin(message, now_s)
            case "part":
                self._done = message["name"]
                if message["fault"]:
                    self._report(Fault(*message["fault"]), GRACE_S, now_s)
            case "ended":
                self._deadline = None
                if isinstance(self._peers, Hub):
                    self._peers.forget_faults()
            case "over" if self._run is not None:
                self._run.stop()
                self._run = None
            case "failed" if not self._has_left:
                fault = exit_fault(self._label, message["code"], message["reason"])
                is_secondary = message["is_secondary"] and self._peers is not None
                self._failure = fault._replace(status="skipped") if is_secondary else fault
                self._report(self._failure, _TIME_TO_FAIL_S, now_s)
            case "left":
                self._has_left = True
                if self._peers is not None:
                    self._peers.notify({"left": True})

    def _meet(self, message: Message, connection: socket.socket, now_s: float) -> None:
        self._has_begun = True  # all ranks could start
        rank, hostnames, token = message["rank"], message["hostnames"], message["token"]
        # Reserve a few seconds of the limit for ending the launch.
        self._limit_s = message["limit_s"] - min(_TIME_TO_END_ALL_S, message["limit_s"] / 4)
        self._period_s = min(_SLOWEST_BEAT_S, self._limit_s / 8)
        self._label = f"rank {rank} ({hostnames[rank]})"
        if rank == 0:
            self._peers = Hub(connection, token, hostnames, self._limit_s, now_s)
            self._connections = family.connections(hostnames[1:])
        else:
            self._peers = Spoke(connection, rank, hostnames[0], token, self._limit_s, now_s)

    def _begin(self, message: Message, now_s: float) -> None:
        self._has_begun = True
        if message["directory"]:
            self._run = OpenRun(Path(message["directory"]), now_s)
        timeout_s, is_isolated = message["timeout_s"], message["is_isolated"]
        spare_s = 0.0
        if is_isolated:  # the ranks' first processes end such a run, unless one of them hangs
            spare_s = self._limit_s + GRACE_S
        elif isinstance(self._peers, Spoke):
            # If rank 0's agent did not end the launch first, mpirun would interrupt rank 0 and
            # its row would name no timeout.
            spare_s = GRACE_S
        at_s = now_s + timeout_s + spare_s
        self._deadline = Deadline(at_s, message["name"], is_isolated, timeout_s)

    def _report(self, fault: Fault, grace_s: float, now_s: float) -> None:
        if isinstance(self._peers, Hub):
            self._peers.add_fault(fault, now_s + grace_s)
        elif self._peers is not None:
            self._peers.notify(fault.message(grace_s=grace_s))

    # Signals and the end of the program.

    def _take_signals(self, now_s: float) -> None:
        while self._signals:
            number = self._signals.pop(0)
            family.send([self._pid], number)
            if number in _ENDING and self._end_by_s is None:
                self._end_by_s = now_s + self._time_to_end_s
                self._note_lost_connections()
                if self._peers is not None:
                    self._peers.notify({"left": True})

    def _note_lost_connections(self) -> None:
        """Name the hosts whose ssh has ended, because mpirun then stops all ranks by SIGTERM."""
        lost = [host for host, pid in self._connections.items() if not family.is_connected(pid)]
        if lost and isinstance(self._peers, Hub):
            reason = f"{', '.join(lost)}: mpirun's ssh connection ended: is sshd there running?"
            self._peers.add_fault(Fault("crash", f"{reason}; {CHECK}"), float("inf"))

    def _reap(self, now_s: float) -> None:
        """Read the program's state; reap orphans, because the agent is their subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid != self._pid:
                continue
            if os.WIFSTOPPED(status):
                self._stopped_at_s = now_s
            elif os.WIFCONTINUED(status):
                self._stopped_at_s = None
            else:
                self._status = os.waitstatus_to_exitcode(status)

    def _join_instead(self, code: int) -> None:
        """Connect to the other agents in the place of a program that died before it could."""
        self._failure = fault_of(self._label, code, self._oom_kills)
        self._channel = start_stand_in(sys.argv)
        now_s = time.monotonic()
        deadline_s = now_s + _TIME_TO_JOIN_S
        while not self._peers and self._channel and not self._end_by_s and now_s < deadline_s:
            self._wait(0.1)
            self._take_signals(now_s := time.monotonic())
            self._take_messages(now_s)

    def _program_ended(self, code: int) -> int:
        self._take_messages(time.monotonic())
        if not (self._is_joining or self._end_by_s or self._failure or self._size == 1):
            self._join_instead(code)
        now_s = time.monotonic()
        if self._end_by_s is not None:
            self._close_interrupted(now_s)
        if self._end_by_s is not None or self._has_left or (code == 0 and self._size == 1):
            return self._leave(code, "crash", "its first process ended before the run did")
        fault = self._failure or fault_of(self._label, code, self._oom_kills)
        if isinstance(self._peers, Spoke):
            self._report(fault, 0.0, now_s)
            self._await_end(now_s + _TIME_TO_CLOSE_S)
        elif isinstance(self._peers, Hub):
            fault = (self._peers.pending() if fault.is_secondary else None) or fault
            self._peers.notify(fault.message())
        # The message of a single rank, which is all that the user sees, says what to do.
        if self._size > 1 or code != EXIT_CODE:
            self._write_start(fault, now_s)
        if code <= 0:
            self._print_error(fault)
        return self._leave(code or fault.exit_code, fault.status, fault.reason)

    def _write_start(self, fault: Fault, now_s: float) -> None:
        """Write a row if no run is open, unless rank 0's agent does so."""
        self._has_begun = True
        if self._run is None and not isinstance(self._peers, Spoke):
            run_dir = write_start(sys.argv, fault, self._start_s)
            self._run = OpenRun(run_dir, now_s) if run_dir is not None else None

    def _leave(self, code: int, status: str, reason: str) -> int:
        if self._run is not None:
            self._run.close(status, reason, time.monotonic())
        if code != 0:
            family.kill_descendants(os.getpid())
        return code

    def _await_end(self, deadline_s: float) -> None:
        """Wait until rank 0 has closed the row."""
        assert self._peers is not None
        while (now_s := time.monotonic()) < deadline_s:
            self._peers.receive(now_s)
            if self._peers.judge(now_s) is not None:
                return
            self._wait(0.1)

    # Judging the launch and ending it.

    def _judge(self, gap_s: float, now_s: float) -> Fault | None:
        if self._end_by_s is not None:
            # In time, because Open MPI sends SIGKILL soon after SIGTERM.
            if now_s >= self._end_by_s:
                self._close_interrupted(now_s)
            return None
        if self._has_daemon and os.getppid() != self._parent:
            return self._orphaned()
        if self._peers is None:
            return self._judge_deadline(now_s)
        if gap_s > self._limit_s:
            return Fault(
                "timeout", f"{self._label}: it was frozen for {gap_s:.0f} s, the others ended"
            )
        stopped_s = 0.0 if self._stopped_at_s is None else now_s - self._stopped_at_s
        if isinstance(self._peers, Hub) and stopped_s > self._limit_s:
            return Fault("timeout", stopped_reason(self._label, stopped_s))
        return self._peers.judge(now_s) or self._judge_deadline(now_s)

    def _close_interrupted(self, now_s: float) -> None:
        """Close the row; the reason is a rank's reported fault, if there is one that does not
        follow from the interruption of other ranks."""
        own = None if self._failure and self._failure.is_secondary else self._failure
        reported = own or (self._peers.primary() if isinstance(self._peers, Hub) else None)
        fault = reported or interruption(has_begun=self._has_begun)
        if not (self._has_begun or self._has_left or self._rank or self._size == 1):
            self._write_start(fault, now_s)
        if self._run is not None:
            self._run.close(fault.status, fault.reason, now_s)
            if fault.status == "interrupted":
                self._print_error(fault)
            self._run = None

    def _orphaned(self) -> Fault:
        status, cause = "crash", ""
        if n_oom_kills() > self._oom_kills:
            status, cause = "oom", "; the kernel killed a process there for memory"
        fault = Fault(status, f"{self._label}: the launcher's daemon that started it died{cause}")
        self._report(fault, 0.0, time.monotonic())
        return fault

    def _judge_deadline(self, now_s: float) -> Fault | None:
        deadline = self._deadline
        if deadline is None or now_s < deadline.at_s:
            return None
        reason = f"not done after {deadline.timeout_s:.0f} s"
        if deadline.is_isolated:
            silent = self._peers.unfinished(deadline.run) if isinstance(self._peers, Hub) else []
            names = ", ".join(silent) or self._label
            reason += f": the first process of {names} does not answer"
        return Fault("timeout", reason)

    def _end(self, fault: Fault) -> int:
        """End this rank; on rank 0, end the launch on every reachable host."""
        if isinstance(self._peers, Hub):
            self._peers.notify(fault.message())
        family.send([self._pid, *family.descendants(self._pid)], signal.SIGKILL)
        self._write_start(fault, time.monotonic())
        self._print_error(fault)
        if self._run is not None:
            self._run.close(fault.status, fault.reason, time.monotonic())
        family.kill_descendants(os.getpid())
        if self._is_openmpi:
            family.end_launcher(fault.silent_hosts)
            if fault.silent_hosts:
                # mpirun must give up the silent hosts before it sees a rank fail, or it hangs.
                time.sleep(_TIME_TO_GIVE_UP_S)
        return fault.exit_code

    def _print_error(self, fault: Fault) -> None:
        """Print the fault on rank 0, or on every rank before the rendezvous."""
        run: Any = f"{self._run.run_dir.name}: {fault.status}: " if self._run else ""
        if not isinstance(self._peers, Spoke):
            reason = fault.reason.partition("\n")[0]
            with contextlib.suppress(OSError):  # its reader has gone
                print(f"error: {run}{reason}", file=sys.stderr, flush=True)

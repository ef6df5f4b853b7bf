"""Heartbeats between rank 0's agent and every other rank's.

The caller passes the time of its host's monotonic clock; hosts need no common clock.
"""

from __future__ import annotations

import hmac
import socket
import time
from typing import NamedTuple

from harness.runtime.agent.wire import Message, Wire


class Fault(NamedTuple):
    """Why the launch ends: the open run's status, a reason in one line, the hosts that do not
    answer, and one exit code for all ranks, because mpirun returns that of the first to end."""

    status: str
    reason: str
    silent_hosts: tuple[str, ...] = ()
    exit_code: int = 1

    @property
    def is_secondary(self) -> bool:
        """Whether it is a consequence of another rank's fault."""
        return self.status == "skipped"

    def message(self, **more: float) -> Message:
        return {"fault": list(self), **more}


def _fault_in(message: Message) -> Fault | None:
    match message.get("fault"):
        case [str(status), str(reason), list(hosts), int(exit_code)]:
            return Fault(status, reason, tuple(map(str, hosts)), exit_code)
    return None


def _utc(ago_s: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - ago_s))


def stopped_reason(label: str, ago_s: float) -> str:
    return (
        f"{label}: its first process has been stopped (SIGSTOP or SIGTSTP) for {ago_s:.0f} s, "
        f"since {_utc(ago_s)}"
    )


class Hub:
    """Rank 0's connections to all other agents."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        hostnames: list[str],
        limit_s: float,
        now_s: float,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._token = token
        self._hostnames = hostnames
        self._limit_s = limit_s
        self._unidentified: list[tuple[Wire, float]] = []
        self._wires: dict[int, Wire] = {}
        self._heard_s = dict.fromkeys(range(1, len(hostnames)), now_s)
        self._states: dict[int, Message] = {}
        self._has_left: set[int] = set()
        self._faults: list[tuple[float, Fault]] = []

    def label(self, rank: int) -> str:
        return f"rank {rank} ({self._hostnames[rank]})"

    def wires(self) -> list[socket.socket | Wire]:
        """The sockets to poll."""
        unidentified = [wire for wire, _ in self._unidentified]
        return [self._listener, *unidentified, *self._wires.values()]

    def receive(self, now_s: float) -> None:
        """Process all messages that have arrived."""
        self._accept(now_s)
        for rank, wire in list(self._wires.items()):
            for message in wire.receive():
                self._take(rank, message, now_s)
            if wire.is_closed:
                self._lose(rank, now_s)

    def _accept(self, now_s: float) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            self._unidentified.append((Wire(connection, self._limit_s), now_s))
        waiting, self._unidentified = self._unidentified, []
        for wire, since_s in waiting:
            messages = wire.receive()
            if messages and (rank := self._identify(messages[0])) is not None:
                self._wires[rank] = wire
                for message in messages:
                    self._take(rank, message, now_s)
            elif messages or wire.is_closed or now_s - since_s > self._limit_s:
                wire.close()
            else:
                self._unidentified.append((wire, since_s))

    def _identify(self, hello: Message) -> int | None:
        token, rank = hello.get("token"), hello.get("rank")
        is_right = isinstance(token, str) and hmac.compare_digest(
            token.encode(), self._token.encode()
        )
        return rank if is_right and rank in self._heard_s and rank not in self._wires else None

    def _take(self, rank: int, message: Message, now_s: float) -> None:
        self._heard_s[rank] = now_s
        if isinstance(state := message.get("state"), dict):
            self._states[rank] = state
        if message.get("left"):
            self._has_left.add(rank)
        if (fault := _fault_in(message)) is not None:
            self.add_fault(fault, now_s + message.get("grace_s", 0.0))

    def add_fault(self, fault: Fault, due_s: float) -> None:
        """End the launch at `due_s`, unless the run ends before that (`forget_faults`)."""
        self._faults.append((due_s, fault))

    def forget_faults(self) -> None:
        self._faults.clear()

    def _lose(self, rank: int, now_s: float) -> None:
        del self._wires[rank]
        if rank in self._has_left:
            del self._heard_s[rank]
            return
        reason = f"{self.label(rank)}: its agent was killed: the connection to it closed"
        # A fault that the rank has reported before this one takes precedence.
        self.add_fault(Fault("crash", reason), now_s)

    def beat(self, state: Message) -> None:
        """Send a heartbeat; it may be dropped."""
        for wire in self._wires.values():
            wire.send({"beat": 1}, is_urgent=False)

    def notify(self, message: Message) -> None:
        """Send a message that must arrive."""
        for wire in self._wires.values():
            wire.send(message)

    def judge(self, now_s: float) -> Fault | None:
        """The fault that ends the launch, or None."""
        is_due = any(now_s >= due_s for due_s, _ in self._faults)
        return (
            (self.pending() if is_due else None)
            or self._judge_heartbeats(now_s)
            or self._judge_stopped()
        )

    def _judge_heartbeats(self, now_s: float) -> Fault | None:
        ages = {rank: now_s - at_s for rank, at_s in self._heard_s.items()}
        silent = [rank for rank, age_s in ages.items() if age_s > self._limit_s]
        if not silent:
            return None
        names = ", ".join(map(self.label, silent))
        age_s = max(ages[rank] for rank in silent)
        return Fault(
            "timeout",
            f"{names}: no heartbeat for {age_s:.0f} s (--heartbeat-timeout-s), last heard at "
            f"{_utc(age_s)}: the host is down, frozen or cut off; try bash setup/check_nodes.sh",
            tuple(dict.fromkeys(self._hostnames[rank] for rank in silent)),
        )

    def _judge_stopped(self) -> Fault | None:
        for rank, state in self._states.items():
            stopped_s = state.get("stopped_s")
            if isinstance(stopped_s, int | float) and stopped_s > self._limit_s:
                return Fault("timeout", stopped_reason(self.label(rank), stopped_s))
        return None

    def primary(self) -> Fault | None:
        """The first reported fault, due or not, that is no consequence of another rank's."""
        return next((fault for _, fault in self._faults if not fault.is_secondary), None)

    def pending(self) -> Fault | None:
        """The first reported fault, due or not; a consequence of another rank's comes last."""
        first = next((fault for _, fault in self._faults), None)
        return self.primary() or (first and first._replace(status="crash"))

    def unfinished(self, run: str) -> list[str]:
        """The other ranks that have not reported the end of their part of a run."""
        return [self.label(r) for r in self._heard_s if self._states.get(r, {}).get("done") != run]


class Spoke:
    """Another rank's connection to rank 0's agent, with the methods of a Hub."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        first_host: str,
        token: str,
        limit_s: float,
        now_s: float,
    ) -> None:
        self._wire = Wire(connection, limit_s)
        self._rank = rank
        self._first_host = first_host
        self._limit_s = limit_s
        self._heard_s = now_s
        self._fault: Fault | None = None
        self._has_left = False
        self._wire.send({"rank": rank, "token": token})

    def wires(self) -> list[socket.socket | Wire]:
        return [] if self._wire.is_closed else [self._wire]

    def receive(self, now_s: float) -> None:
        if self._wire.is_closed:
            return
        for message in self._wire.receive():
            self._heard_s = now_s
            self._fault = self._fault or _fault_in(message)
        if self._wire.is_closed and not self._fault and not self._has_left:
            self._fault = Fault("", "rank 0 is gone: the connection to its agent closed")

    def beat(self, state: Message) -> None:
        self._wire.send({"state": state}, is_urgent=False)

    def notify(self, message: Message) -> None:
        self._has_left = self._has_left or bool(message.get("left"))
        self._wire.send(message)

    def judge(self, now_s: float) -> Fault | None:
        if self._fault is not None:
            return self._fault
        age_s = now_s - self._heard_s
        if self._wire.is_closed or age_s <= self._limit_s:
            return None
        reason = (
            f"no heartbeat from rank 0 for {age_s:.0f} s (--heartbeat-timeout-s), last heard at "
            f"{_utc(age_s)}"
        )
        # Rank 0 may live and only be slow; it would call this agent killed.
        self._wire.send(Fault("timeout", f"rank {self._rank} got {reason}").message())
        return Fault("", reason, (self._first_host,))


Peers = Hub | Spoke  # an agent's connections to other agents

"""Heartbeats between the agents of a launch: rank 0's hears all others, which hear rank 0's.

Ages are by a monotonic clock that the caller reads, which no two hosts need to share.
"""

from __future__ import annotations

import hmac
import socket
import time
from typing import NamedTuple, Protocol

from harness.runtime.agent.wire import Message, Wire

# A rank whose peer has failed may notice by itself before the launch is ended.
GRACE_S = 3.0


class Fault(NamedTuple):
    """Why the launch ends: the status of the open run, the reason in one line, the hosts that do
    not answer, and the exit code of all ranks, so that mpirun's is the same whoever ends first."""

    status: str
    reason: str
    silent_hosts: tuple[str, ...] = ()
    exit_code: int = 1

    def message(self, **more: float) -> Message:
        return {"fault": list(self), **more}


def _has_followed(fault: Fault) -> bool:
    return fault.status == "skipped"


def _fault_in(message: Message) -> Fault | None:
    match message.get("fault"):
        case [str(status), str(reason), list(hosts), int(exit_code)]:
            return Fault(status, reason, tuple(map(str, hosts)), exit_code)
    return None


class Peers(Protocol):
    """What the loop of an agent needs of its connections."""

    def wires(self) -> list[socket.socket | Wire]:
        """What to wait for."""
        ...

    def receive(self, now_s: float) -> None:
        """Take in what has arrived."""
        ...

    def beat(self, state: Message) -> None:
        """Tell the others that this agent lives."""
        ...

    def tell(self, message: Message) -> None:
        """Send to the others what must arrive."""
        ...

    def judge(self, now_s: float) -> Fault | None:
        """Why the launch must end; None while all is well."""
        ...


def _utc(ago_s: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - ago_s))


def stopped_reason(who: str, ago_s: float) -> str:
    return (
        f"{who}: its first process has been stopped (SIGSTOP or SIGTSTP) for {ago_s:.0f} s, "
        f"since {_utc(ago_s)}"
    )


class Hub:
    """Rank 0's end."""

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
        self._strangers: list[tuple[Wire, float]] = []
        self._wires: dict[int, Wire] = {}
        self._heard_s = dict.fromkeys(range(1, len(hostnames)), now_s)
        self._states: dict[int, Message] = {}
        self._has_left: set[int] = set()
        self._faults: list[tuple[float, Fault]] = []

    def who(self, rank: int) -> str:
        return f"rank {rank} ({self._hostnames[rank]})"

    def wires(self) -> list[socket.socket | Wire]:
        strangers = [wire for wire, _ in self._strangers]
        return [self._listener, *strangers, *self._wires.values()]

    def receive(self, now_s: float) -> None:
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
            self._strangers.append((Wire(connection), now_s))
        waiting, self._strangers = self._strangers, []
        for wire, since_s in waiting:
            messages = wire.receive()
            if messages and (rank := self._known(messages[0])) is not None:
                self._wires[rank] = wire
                for message in messages:
                    self._take(rank, message, now_s)
            elif messages or wire.is_closed or now_s - since_s > self._limit_s:
                wire.close()
            else:
                self._strangers.append((wire, since_s))

    def _known(self, hello: Message) -> int | None:
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
        """End the launch at a time, unless the run is over before (`forget_faults`)."""
        self._faults.append((due_s, fault))

    def forget_faults(self) -> None:
        self._faults.clear()

    def _lose(self, rank: int, now_s: float) -> None:
        del self._wires[rank]
        if rank in self._has_left:
            del self._heard_s[rank]
            return
        reason = f"{self.who(rank)}: its agent was killed: the connection to it closed"
        # What its first process, or mpirun, has to say of it may still be on its way.
        self.add_fault(Fault("crash", reason), now_s)

    def beat(self, state: Message) -> None:
        for wire in self._wires.values():
            wire.send({"beat": 1}, is_urgent=False)

    def tell(self, message: Message) -> None:
        for wire in self._wires.values():
            wire.send(message)

    def judge(self, now_s: float) -> Fault | None:
        is_due = any(now_s >= due_s for due_s, _ in self._faults)
        return (self.pending() if is_due else None) or self._silence(now_s) or self._stop()

    def _silence(self, now_s: float) -> Fault | None:
        ages = {rank: now_s - at_s for rank, at_s in self._heard_s.items()}
        silent = [rank for rank, age_s in ages.items() if age_s > self._limit_s]
        if not silent:
            return None
        names = ", ".join(map(self.who, silent))
        age_s = max(ages[rank] for rank in silent)
        return Fault(
            "timeout",
            f"{names}: no heartbeat for {age_s:.0f} s (--heartbeat-timeout-s), last heard at "
            f"{_utc(age_s)}: the host is down, frozen or cut off; try bash setup/check_nodes.sh",
            tuple(dict.fromkeys(self._hostnames[rank] for rank in silent)),
        )

    def _stop(self) -> Fault | None:
        for rank, state in self._states.items():
            stopped_s = state.get("stopped_s")
            if isinstance(stopped_s, int | float) and stopped_s > self._limit_s:
                return Fault("timeout", stopped_reason(self.who(rank), stopped_s))
        return None

    def pending(self) -> Fault | None:
        """The first fault that a rank has reported, due or not; one that only followed from another
        rank's (`skipped`) comes last."""
        faults = sorted((fault for _, fault in self._faults), key=_has_followed)
        if not faults:
            return None
        return faults[0]._replace(status="crash") if _has_followed(faults[0]) else faults[0]

    def unfinished(self, run: str) -> list[str]:
        """The other ranks that have not said that their part of a run is over."""
        return [self.who(r) for r in self._heard_s if self._states.get(r, {}).get("done") != run]


class Spoke:
    """The end of every other rank."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        first_host: str,
        token: str,
        limit_s: float,
        now_s: float,
    ) -> None:
        self._wire = Wire(connection)
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

    def tell(self, message: Message) -> None:
        self._has_left = self._has_left or bool(message.get("left"))
        self._wire.send(message)

    def judge(self, now_s: float) -> Fault | None:
        if self._fault is not None:
            return self._fault
        age_s = now_s - self._heard_s
        if self._wire.is_closed or age_s <= self._limit_s:
            return None
        return Fault(
            "",
            f"no heartbeat from rank 0 for {age_s:.0f} s (--heartbeat-timeout-s), last heard at "
            f"{_utc(age_s)}",
            (self._first_host,),
        )

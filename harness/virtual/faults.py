"""Inject realistic faults into a node, and heal it, to test the node checks and runs."""

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Literal, get_args

from harness.errors import ConfigError
from harness.virtual import limits, network, node, state, system
from harness.virtual.state import SWITCH, State

Kind = Literal["off", "wrong-key", "hang", "cut", "freeze", "slow", "heal"]
_SLOW_SHARE = 1 / 3
KINDS: tuple[str, ...] = get_args(Kind)


def condition(place: State, name: str) -> str:
    """`up`, the injected fault's kind, or `dead` if the sshd ended without a fault."""
    fault = _fault_file(place, name)
    if fault.exists():
        return fault.read_text()
    return "up" if system.read_alive(place.pid_file(name)) else "dead"


def _fault_file(place: State, name: str) -> Path:
    return place.node(name) / "fault"


def inject(place: State, name: str, kind: Kind) -> None:
    """Heal a node, then put it into a condition. The caller holds the lock.

    off: link down and all processes killed. wrong-key: the sshd has a host key that other nodes do
    not know. hang: the sshd is stopped, so TCP connects without an answer. cut: link down,
    processes go on. freeze: all processes stopped, as if the kernel hangs. slow: a third of the CPU
    quota. heal: as built; after cut, freeze and slow the processes continue.

    Raises:
        ConfigError: the node is to become slow and has no CPU quota.
    """
    _heal(place, name)
    match kind:
        case "off":
            _end(place, name)
            network.set_link(place.namespace(SWITCH), _index(place, name), up=False)
        case "wrong-key":
            _end(place, name)
            _exchange_key(place, name)
            _start(place, name)
        case "hang":
            # The kernel still accepts connections for a stopped process.
            pid = system.read_alive(place.pid_file(name))
            assert pid is not None, "just healed"
            os.kill(pid, signal.SIGSTOP)
        case "cut":
            network.set_link(place.namespace(SWITCH), _index(place, name), up=False)
        case "freeze":
            _signal(place, name, signal.SIGSTOP)
        case "slow":
            _set_share(place, name, _SLOW_SHARE)
        case "heal":
            return
    _fault_file(place, name).write_text(kind)


def _index(place: State, name: str) -> int:
    return [one.name for one in state.load(place).plan.nodes].index(name)


def _set_share(place: State, name: str, share: float) -> None:
    """Give a node a share of the CPU quota that it was built with."""
    node_plan = state.load(place).plan.node(name)
    if node_plan.cpu is None:
        raise ConfigError(
            f"{name} has no CPU quota of which it could get a part: build the cluster with --cpu"
        )
    limits.change_cpu(place.name, node_plan, node_plan.cpu * share)


def _end(place: State, name: str) -> None:
    system.end_all(lambda: system.in_namespaces([place.namespace(name)]))


def _start(place: State, name: str) -> None:
    node.boot(place, name)
    node.wait_until_ready(place, name)


def _key_pair(place: State, name: str) -> list[Path]:
    key = node.host_key_file(place, name)
    return [key, key.with_suffix(".pub")]


def _backup(place: State, name: str, key: Path) -> Path:
    return place.node(name) / f"right-{key.name}"


def _exchange_key(place: State, name: str) -> None:
    for key in _key_pair(place, name):
        shutil.copy2(key, _backup(place, name, key))
    node.make_key(node.host_key_file(place, name), name)


def _signal(place: State, name: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a node, including those started during this call."""
    found: set[int] = set()
    while new := system.in_namespaces([place.namespace(name)]) - found:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        found |= new


def _heal(place: State, name: str) -> None:
    fault = condition(place, name)
    if fault == "up":
        return
    if fault in ("cut", "freeze", "slow"):
        if fault == "cut":
            network.set_link(place.namespace(SWITCH), _index(place, name), up=True)
        elif fault == "slow":
            _set_share(place, name, 1.0)
        else:
            _signal(place, name, signal.SIGCONT)
        _fault_file(place, name).unlink()
        return
    _end(place, name)
    for key in _key_pair(place, name):
        if (backup := _backup(place, name, key)).exists():
            backup.replace(key)
    network.set_link(place.namespace(SWITCH), _index(place, name), up=True)
    _start(place, name)
    _fault_file(place, name).unlink(missing_ok=True)

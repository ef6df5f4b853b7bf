"""Build, describe and remove a virtual cluster, and inject realistic faults into its nodes.

`down` needs only the cluster's name, so it also cleans up after an `up` that was killed: it finds
everything in the state directory, in the namespaces bound there, and in cgroups of that name.
"""

import contextlib
import json
import os
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, get_args

from harness.errors import ConfigError, EnvironmentSetupError
from harness.virtual import limits, network, node, relay, state, system
from harness.virtual.plan import ClusterPlan
from harness.virtual.state import SWITCH, Saved, State
from harness.virtual.system import run

_SSHD_DIRECTORY = Path("/run/sshd")  # compiled into Debian's sshd, which does not make it

Kind = Literal["off", "wrong-key", "hang", "cut", "freeze", "slow", "heal"]
_SLOW_SHARE = 1 / 3
KINDS: tuple[str, ...] = get_args(Kind)


def up(place: State, saved: Saved) -> None:
    """Build a cluster, or remove all of it if a step fails. The caller holds the lock.

    Raises:
        ConfigError: a cluster of that name exists.
        EnvironmentSetupError: a step failed; has the tool's message.
    """
    if place.directory.exists():
        raise ConfigError(
            f"virtual cluster {place.name} is up already: take it down with `bash "
            f"setup/virtual_cluster.sh down --name {place.name}`, or give --replace"
        )
    try:
        _build(place, saved)
    except BaseException:
        down(place)
        raise


def _build(place: State, saved: Saved) -> None:
    place.directory.mkdir(mode=0o700)
    state.save(place, saved)
    for one in saved.plan.nodes:
        limits.set_limits(place.name, one)
    node.write_files(place, saved)
    _connect(place, saved)
    # Never removed, because an sshd that systemd starts at a login may need it.
    _SSHD_DIRECTORY.mkdir(mode=0o755, exist_ok=True)
    for one in saved.plan.nodes:
        node.boot(place, one.name)
    for one in saved.plan.nodes:
        node.wait_until_ready(place, one.name)
    saved.hostfile.parent.mkdir(parents=True, exist_ok=True)
    slots = "".join(f"{one.name} slots=1\n" for one in saved.plan.nodes)
    state.replace_file(saved.hostfile, slots)
    described = json.dumps(describe(place, saved), indent=1) + "\n"
    state.replace_file(saved.hostfile.with_suffix(".json"), described)


def _connect(place: State, saved: Saved) -> None:
    """Make namespaces, switch and links."""
    names = [state.SWITCH, *(one.name for one in saved.plan.nodes)]
    place.namespace("").mkdir(mode=0o700)
    for name in names:
        path = place.namespace(name)
        path.touch()
        run(["unshare", f"--net={path}", "true"])
    switch, *nodes = [place.namespace(name) for name in names]
    network.build_switch(switch)
    netem = not saved.plan.has_latency or network.has_netem(switch)
    relayed = [not netem and one.latency_s > 0 for one in saved.plan.nodes]
    network.build_pairs(switch, {i: path for i, path in enumerate(nodes) if not relayed[i]})
    if any(relayed):
        relay.start(place, saved.plan)
    network.configure(saved.plan, switch, nodes, netem=netem)


def describe(place: State, saved: Saved) -> dict[str, object]:
    """The cluster as JSON, for a file beside the hostfile; has paths of keys, not their content."""
    return {
        "schema": "harness-virtual",
        "version": 1,
        "name": saved.plan.name,
        "subnet": saved.plan.subnet,
        "hostfile": str(saved.hostfile),
        "state_directory": str(place.directory),
        "ssh": {
            "identity_file": str(place.login_key),
            "known_hosts": str(place.ssh / "known_hosts"),
        },
        "nodes": [
            {**asdict(one), "namespace": str(place.namespace(one.name))} for one in saved.plan.nodes
        ],
    }


def _members(place: State) -> set[int]:
    return system.in_namespaces(place.namespaces()) | limits.members(place.name)


def down(place: State, hostfile: Path | None = None) -> bool:
    """Remove a cluster and its processes; returns whether it existed. The caller holds the lock.

    Args:
        hostfile: its path if the state lacks it after a crash.

    Raises:
        EnvironmentSetupError: a process does not end, or this runs on one of its nodes.
    """
    if os.getpid() in _members(place):
        raise EnvironmentSetupError("a node cannot take its own cluster down: do it from outside")
    existed = place.directory.exists()
    plan: ClusterPlan | None = None
    try:
        saved = state.load(place)
        hostfile, plan = saved.hostfile, saved.plan
    except (ConfigError, EnvironmentSetupError):
        pass  # incomplete or absent: remove the rest
    existed |= system.end_all(lambda: _members(place)) > 0
    limits.remove(place.name)
    for one in plan.nodes if plan is not None else ():  # sessions of Open MPI's killed daemons
        shutil.rmtree(Path("/tmp") / f"ompi.{one.name}.{os.geteuid()}", ignore_errors=True)
    state.remove(place)
    if existed and hostfile is not None:
        hostfile.unlink(missing_ok=True)
        hostfile.with_suffix(".json").unlink(missing_ok=True)
    return existed


def status(place: State) -> list[dict[str, object]]:
    """One row per node: plan, condition, and number of processes killed for lack of memory.

    Raises:
        ConfigError: no such cluster.
    """
    return [
        {
            **asdict(one),
            "condition": condition(place, one.name),
            "n_oom_kills": limits.n_oom_kills(place.name, one.name),
        }
        for one in state.load(place).plan.nodes
    ]


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

    off: link down and all processes killed. wrong-key: all processes killed, and an sshd with a
    host key that other nodes do not know. hang: the sshd is stopped, so TCP connects without an
    answer. cut: link down, processes go on. freeze: all processes stopped, as if the kernel hangs.
    slow: a third of the CPU quota. heal: as built; after cut, freeze and slow the processes
    continue.

    Raises:
        ConfigError: the node is to become slow and has no CPU quota.
    """
    _heal(place, name)
    match kind:
        case "off":
            _end(place, name)
            _set_link(place, name, up=False)
        case "wrong-key":
            _end(place, name)
            for key in _key_pair(place, name):
                shutil.copy2(key, _backup(place, name, key))
            node.make_key(node.host_key_file(place, name), name)
            _start(place, name)
        case "hang":
            # The kernel still accepts connections for a stopped process.
            pid = system.read_alive(place.pid_file(name))
            assert pid is not None, "just healed"
            os.kill(pid, signal.SIGSTOP)
        case "cut":
            _set_link(place, name, up=False)
        case "freeze":
            _signal(place, name, signal.SIGSTOP)
        case "slow":
            _set_share(place, name, _SLOW_SHARE)
        case "heal":
            return
    _fault_file(place, name).write_text(kind)


def _set_link(place: State, name: str, *, up: bool) -> None:
    index = [one.name for one in state.load(place).plan.nodes].index(name)
    network.set_link(place.namespace(SWITCH), index, up=up)


def _set_share(place: State, name: str, share: float) -> None:
    """Give a node a share of the CPU quota that it was built with."""
    node_plan = state.load(place).plan.node(name)
    if node_plan.cpu is None:
        raise ConfigError(
            f"{name} has no CPU quota of which it could get a part: build the cluster with --cpu"
        )
    limits.set_limits(place.name, replace(node_plan, cpu=node_plan.cpu * share))


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


def _signal(place: State, name: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a node, including those started during this call."""
    found: set[int] = set()
    while new := system.in_namespaces([place.namespace(name)]) - found:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        found |= new


def _heal(place: State, name: str) -> None:
    match condition(place, name):
        case "up":
            return
        case "cut":
            _set_link(place, name, up=True)
        case "freeze":
            _signal(place, name, signal.SIGCONT)
        case "slow":
            _set_share(place, name, 1.0)
        case _:
            _end(place, name)
            for key in _key_pair(place, name):
                if (backup := _backup(place, name, key)).exists():
                    backup.replace(key)
            _set_link(place, name, up=True)
            _start(place, name)
    _fault_file(place, name).unlink(missing_ok=True)

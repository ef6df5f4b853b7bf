"""Build, describe and remove a virtual cluster.

`down` needs only the cluster's name, so it also cleans up after an `up` that was killed: it finds
everything in the state directory, in the namespaces bound there, and in cgroups of that name.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from harness.errors import ConfigError, EnvironmentSetupError
from harness.virtual import faults, limits, network, node, relay, state, system
from harness.virtual.plan import ClusterPlan
from harness.virtual.state import Saved, State
from harness.virtual.system import run

_SSHD_DIRECTORY = Path("/run/sshd")  # compiled into Debian's sshd, which does not make it


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
        limits.create(place.name, one)
    node.write_files(place, saved)
    _connect(place, saved)
    # Never removed, because an sshd that systemd starts at a login may need it.
    _SSHD_DIRECTORY.mkdir(mode=0o755, exist_ok=True)
    for one in saved.plan.nodes:
        node.boot(place, one.name)
    for one in saved.plan.nodes:
        node.wait_until_ready(place, one.name)
    _write_hosts(place, saved)


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


def _write_hosts(place: State, saved: Saved) -> None:
    saved.hostfile.parent.mkdir(parents=True, exist_ok=True)
    _replace(saved.hostfile, "".join(f"{one.name} slots=1\n" for one in saved.plan.nodes))
    _replace(
        saved.hostfile.with_suffix(".json"), json.dumps(describe(place, saved), indent=1) + "\n"
    )


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


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
            "condition": faults.condition(place, one.name),
            "n_oom_kills": limits.n_oom_kills(place.name, one.name),
        }
        for one in state.load(place).plan.nodes
    ]

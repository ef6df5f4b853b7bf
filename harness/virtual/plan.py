"""The plan of a virtual cluster: names, addresses and limits of its nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import ConfigError
from harness.inputs import find_number, is_positive, shorten
from harness.units import (
    format_bandwidth,
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

DEFAULT_NAME = "virtual"
MAX_NODES = 250  # a /24 less network and broadcast address, and a reserve
# Below the minimum one frame takes over a second; veth and tbf's 32-bit burst set the maximum.
MIN_BANDWIDTH_BYTES_PER_S = 1250.0
MAX_BANDWIDTH_BYTES_PER_S = 12.5e9
MIN_CPU = 0.01
# An sshd with one session and Open MPI's daemon needs 15 MiB; below 32 MiB no rank can start.
MIN_MEMORY_BYTES = 32 * 2**20
# Names become file, cgroup and host names, so they must need no quoting.
_NAME = re.compile(r"[a-z][a-z0-9]{0,14}")


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node.

    Attributes:
        latency_s: one way, on the node's link to the switch; a round trip between nodes has four.
        bandwidth_bytes_per_s: of the link, per direction; None: unshaped.
        cpu: CPU quota in cores, 0.4 is 40 % of one; None: unlimited.
        memory_bytes: limit of all the node's processes together; None: unlimited.
    """

    name: str
    address: str
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0
    cpu: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Nodes of one virtual cluster on one switch.

    Attributes:
        subnet_index: the third byte of its 10.199.K.0/24; differs between clusters.
    """

    name: str
    subnet_index: int
    nodes: tuple[NodePlan, ...]

    @property
    def subnet(self) -> str:
        return f"10.199.{self.subnet_index}.0/24"

    @property
    def has_latency(self) -> bool:
        return any(node.latency_s > 0 for node in self.nodes)

    def node(self, name_or_index: str) -> NodePlan:
        """Find a node by name or by position.

        Raises:
            ConfigError: no such node; lists the existing ones.
        """
        for index, node in enumerate(self.nodes):
            if name_or_index in (node.name, str(index)):
                return node
        raise ConfigError(
            f"cluster {self.name} has no node {name_or_index!r}: "
            f"name one of {self.nodes[0].name} to {self.nodes[-1].name}"
        )

    @classmethod
    def from_dict(cls, data: object) -> ClusterPlan:
        """The plan that cluster.json holds.

        Raises:
            ConfigError: malformed data; names the field.
        """
        values = _checked(data, _OF_CLUSTER)
        nodes = tuple(NodePlan(**_checked(node, _OF_NODE)) for node in values["nodes"])
        return cls(name=values["name"], subnet_index=values["subnet_index"], nodes=nodes)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_positive(value)


_ADDRESS = re.compile(r"10\.199(?:\.[0-9]{1,3}){2}", re.ASCII)
_HOST = re.compile(r"[a-z][a-z0-9-]{0,30}")
# Validators of the fields of cluster.json.
_OF_CLUSTER: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str) and _NAME.fullmatch(value) is not None,
    "subnet_index": lambda value: type(value) is int and 0 <= value < 256,
    "nodes": lambda value: isinstance(value, list | tuple) and 1 <= len(value) <= MAX_NODES,
}
_OF_NODE: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str) and _HOST.fullmatch(value) is not None,
    "address": lambda value: isinstance(value, str) and _ADDRESS.fullmatch(value) is not None,
    "bandwidth_bytes_per_s": lambda value: value is None or _is_number(value),
    "latency_s": lambda value: value == 0 or _is_number(value),
    "cpu": lambda value: value is None or _is_number(value),
    "memory_bytes": lambda value: value is None or (type(value) is int and _is_number(value)),
}


def _checked(data: object, wanted: dict[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """Validate an object; returns its known fields without those of other versions."""
    if not isinstance(data, dict):
        raise ConfigError(f"{shorten(data)} stands where {', '.join(wanted)} should")
    for name, is_right in wanted.items():
        if name in data and not is_right(data[name]):
            raise ConfigError(f"its {name} is {shorten(data[name])}")
        if name not in data and name in ("name", "address", "subnet_index", "nodes"):
            raise ConfigError(f"it has no {name}")
    return {name: data[name] for name in wanted if name in data}


T = TypeVar("T")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"cluster name {name!r} must be 1 to 15 lower-case letters and digits, "
            "the first a letter: try --name second"
        )
    return name


def _spread(
    flag: str, text: str | None, n_nodes: int, parse: Callable[[str], T]
) -> list[T] | list[None]:
    """Assign a flag's comma-separated values to the nodes: one for all, or one per node."""
    if text is None:
        return [None] * n_nodes
    values = [value.strip() for value in text.split(",")]
    if len(values) not in (1, n_nodes):
        raise ConfigError(
            f"{flag} has {len(values)} values and the cluster {n_nodes} nodes: "
            "give one value for all, or one for each"
        )
    found = [parse(value) for value in values]
    return found if len(found) == n_nodes else found * n_nodes


def _bandwidth(text: str) -> float:
    value = parse_bandwidth(text)
    if not MIN_BANDWIDTH_BYTES_PER_S <= value <= MAX_BANDWIDTH_BYTES_PER_S:
        raise ConfigError(
            f"--bandwidth {text} is {format_bandwidth(value)}, a link carries 10kbit to 100gbit: "
            "write it like 1gbit"
        )
    return value


def _cpu(text: str, n_cores: int) -> float:
    value = find_number(text)
    if value is None:
        raise ConfigError(f"--cpu {shorten(text)} is not a number of cores: write it like 0.4")
    if not MIN_CPU <= value <= n_cores:
        raise ConfigError(
            f"--cpu {text} is outside {MIN_CPU} to {n_cores}, this machine's cores: write it "
            "like 0.4"
        )
    return value


def _memory(text: str) -> int:
    value = parse_bytes(text)
    if value < MIN_MEMORY_BYTES:
        raise ConfigError(
            f"--memory {text} is {format_bytes(value)}, a node needs "
            f"{format_bytes(MIN_MEMORY_BYTES)} to start a process: write it like 2GiB"
        )
    return value


def _latency(text: str) -> float:
    value = parse_duration(text)
    if value > 1.0:
        raise ConfigError(f"--latency {text} is over 1 s: write it like 500us")
    return value


def host_name(cluster: str, index: int) -> str:
    """`node3` in the default cluster, `second-node3` in one named `second`."""
    return f"node{index}" if cluster == DEFAULT_NAME else f"{cluster}-node{index}"


def make_plan(
    *,
    name: str = DEFAULT_NAME,
    n_nodes: int,
    n_cores: int,
    bandwidth: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    latency: str | None = None,
    taken_subnets: Collection[int] = (),
) -> ClusterPlan:
    """Plan a cluster from its flags, which take one value for all nodes or a list.

    Args:
        n_cores: of this machine, the maximum for a node.
        taken_subnets: subnet indices of existing clusters.

    Raises:
        ConfigError: a flag is malformed, out of range, or has the wrong number of values.
    """
    if not 1 <= n_nodes <= MAX_NODES:
        raise ConfigError(f"--nodes {n_nodes} is outside 1 to {MAX_NODES}")
    subnet_index = next((k for k in range(256) if k not in taken_subnets), None)
    if subnet_index is None:
        raise ConfigError("256 virtual clusters stand already: take one down first")
    columns = zip(
        _spread("--bandwidth", bandwidth, n_nodes, _bandwidth),
        _spread("--latency", latency, n_nodes, _latency),
        _spread("--cpu", cpu, n_nodes, partial(_cpu, n_cores=n_cores)),
        _spread("--memory", memory, n_nodes, _memory),
        strict=True,
    )
    nodes = tuple(
        NodePlan(
            name=host_name(name, index),
            address=f"10.199.{subnet_index}.{index + 1}",
            bandwidth_bytes_per_s=node_bandwidth,
            latency_s=node_latency or 0.0,
            cpu=node_cpu,
            memory_bytes=node_memory,
        )
        for index, (node_bandwidth, node_latency, node_cpu, node_memory) in enumerate(columns)
    )
    return ClusterPlan(name=check_name(name), subnet_index=subnet_index, nodes=nodes)


def hostfile_path(hosts_dir: Path, name: str) -> Path:
    """hosts/virtual.txt for the default cluster, hosts/virtual-NAME.txt for others."""
    stem = "virtual" if name == DEFAULT_NAME else f"virtual-{name}"
    return hosts_dir / f"{stem}.txt"

"""Hashes of the model, profile and cluster that a strategy was planned for, and their changes."""

from __future__ import annotations

import hashlib

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile


class MadeFor(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Fingerprints of a strategy's graph, profile and cluster, fine enough to name a difference.

    Attributes:
        operators: short hash of each operator, by name.
        devices: kind and memory of each device, by name, in rank order; none of any devices.
        links_hash: hash of links, interfaces and collective curves.
    """

    model: str = ""
    graph_hash: str = ""
    profile_hash: str = ""
    cluster_hash: str = ""
    links_hash: str = ""
    operators: dict[str, str] = {}
    devices: dict[str, str] = {}

    def of_any_devices(self) -> MadeFor:
        """Those of the model alone, because the cluster does not exist."""
        return msgspec.structs.replace(self, cluster_hash="", links_hash="", devices={})


def _short_hash(*values: object) -> str:
    data = msgspec.json.encode(values, order="sorted")
    return hashlib.sha256(data).hexdigest()[:12]


def _links_hash(cluster: Cluster) -> str:
    nics = [node.nic_bytes_per_s for node in cluster.nodes]
    return _short_hash(nics, cluster.node_of(), cluster.links, cluster.collectives)


def _cluster_hash(cluster: Cluster) -> str:
    return _short_hash(_links_hash(cluster), cluster.devices)


def is_by(made_for: MadeFor, cluster: Cluster, profile: Profile) -> bool:
    """Whether a strategy was planned with exactly these measurements, for any model."""
    measured = _cluster_hash(cluster), profile.content_hash()
    return (made_for.cluster_hash, made_for.profile_hash) == measured


def fingerprint(graph: Graph, cluster: Cluster, profile: Profile | None = None) -> MadeFor:
    return MadeFor(
        model=graph.name,
        graph_hash=graph.content_hash(),
        profile_hash=profile.content_hash() if profile is not None else "",
        cluster_hash=_cluster_hash(cluster),
        links_hash=_links_hash(cluster),
        operators={op.name: _short_hash(op)[:8] for op in graph.operators},
        devices={d.name: f"{d.kind}, {d.memory_bytes} B" for d in cluster.devices},
    )


def _changed(noun: str, old: dict[str, str], new: dict[str, str], *, values: bool) -> list[str]:
    """Say in one sentence each: removed, new and changed names, with the first example."""
    found = []
    gone = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    other = [name for name in old if name in new and old[name] != new[name]]
    for names, word in ((gone, "is gone"), (added, "is new"), (other, "changed")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            detail = (
                f" from {old[names[0]]!r} to {new[names[0]]!r}" if values and names is other else ""
            )
            found.append(f"{noun} {names[0]!r} {word}{detail}{more}")
    if not found and list(old) != list(new):
        found.append(f"the order of {noun}s changed")
    return found


def differences(old: MadeFor, new: MadeFor) -> list[str]:
    """Describe the changes of graph and devices since a strategy was planned; empty when there are
    none."""
    found: list[str] = []
    if old.graph_hash != new.graph_hash:
        if old.model != new.model:
            found.append(f"the model was {old.model!r} and is {new.model!r}")
        found += _changed("operator", old.operators, new.operators, values=False)
        if not found:
            found.append("the graph's batch or name changed")
    if old.devices:
        found += _changed("device", old.devices, new.devices, values=True)
    return found

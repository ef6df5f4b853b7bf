"""Find the files that `./entry.sh profile` wrote, so that planning finds them by itself."""

from __future__ import annotations

import re
from pathlib import Path

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.sharding import has_tasks

RESULTS = Path("results")


def default_profile(model: str, dtype: str = "fp32", results: Path = RESULTS) -> Path:
    """Where a model's profile in one dtype goes unless the user says otherwise."""
    name = re.sub(r"[^\w.-]+", "_", model if dtype == "fp32" else f"{model}-{dtype}")
    return results / f"profile-{name}.json"


def graph_beside(profile: Path) -> Path:
    """The graph that a profile was measured for: `profile-vgg16.json` has its own in
    `profile-vgg16.graph.json`."""
    return profile.with_suffix(".graph.json")


def knows(profile: Profile, graph: Graph, cluster: Cluster) -> bool:
    """Whether a profile measured every operator on every kind of device."""
    known = {(point.device_kind, point.operator) for point in profile.measurements}
    return all(
        (device.kind, operator.profile_key) in known
        for device in cluster.devices
        for operator in filter(has_tasks, graph.operators)
    )

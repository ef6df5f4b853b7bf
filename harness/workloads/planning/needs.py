"""The runs that planning builds on: links, profile and search, each as a Need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import is_by
from harness.domain.profile import Profile
from harness.errors import HarnessError
from harness.runtime.ranks.host import code_commit
from harness.workloads.common.contract import Need, config_json
from harness.workloads.planning.files import find_cluster, find_search, has_profiled
from harness.workloads.planning.profile_config import ProfileConfig
from harness.workloads.planning.profile_points import part_sizes
from harness.workloads.planning.search_config import SearchConfig

# Flags that change how much is measured, but not the meaning of a measurement.
_EFFORT_FLAGS = ("shards", "time_budget_s", "min_samples", "rounds", "warm_up")


def links_need() -> Need:
    """Need the links between all ranks, measured once for a set of nodes."""

    def is_met(results: Path, cluster: Cluster) -> bool:
        return find_cluster(results, cluster) is not None

    return Need(name="links", config={}, is_met=is_met)


def profile_settings(config: ProfileConfig) -> dict[str, Any]:
    """The settings that two profile runs must share to measure the same operators."""
    return {name: value for name, value in config_json(config).items() if name not in _EFFORT_FLAGS}


def profile_need(search_config: SearchConfig, n_parts: int = 1) -> Need:
    """Need the profile of a model's operators on each kind of device.

    Args:
        n_parts: a further number of parts that the batch is cut into (microbatches).
    """
    config = search_config.profile_config(n_parts)
    wanted = profile_settings(config)

    def is_met(results: Path, cluster: Cluster) -> bool:
        file = config.path(results)
        parts = part_sizes(config.batch_size, [1, n_parts])
        return has_profiled(results, wanted, cluster, file=file, parts=parts)

    return Need(name="profile", config=config_json(config), is_met=is_met)


def search_need(search_config: SearchConfig) -> Need:
    """Need a search with these flags on these ranks, by this commit, cluster and profile."""
    config = config_json(search_config)

    def is_met(results: Path, cluster: Cluster) -> bool:
        found = find_search(results, config, cluster, commit=code_commit())
        measured = find_cluster(results, cluster) or cluster
        try:
            profile = Profile.load(search_config.profile_config().path(results))
        except HarnessError:
            return False
        return found is not None and is_by(found[0].made_for, measured, profile)

    return Need(name="search", config=config, is_met=is_met)

"""Find measured clusters, profiles and earlier plans in a results directory.

Called on rank 0 only, because other nodes may not share the directory.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import CLUSTER_FILE, Cluster
from harness.domain.fingerprint import MadeFor
from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.profile import Profile
from harness.domain.run import RunHeader
from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.inputs import one_line
from harness.measure.store import headers_in, write_atomically


def _signatures(cluster: Cluster) -> list[tuple[str, float | None, str]]:
    """Host, NIC speed and kind of each device, which identify it across launches."""
    return [
        (node.name, node.nic_bytes_per_s, device.kind)
        for node in cluster.nodes
        for device in node.devices
    ]


def finished_runs(results: Path, workload: str) -> Iterator[tuple[RunHeader, Path]]:
    """Runs of a workload that ended ok, newest first."""
    return ((header, path) for header, path in _runs(results, workload) if header.status == "ok")


def find_failure(results: Path, workload: str, wanted: dict[str, Any], cluster: Cluster) -> str:
    """Say why the newest run with these settings, on these devices (or more), failed.

    Returns:
        One line, such as `profile failed: REASON`; empty if it did not fail or none has ended.
    """
    devices = _signatures(cluster)
    for header, _ in _runs(results, workload):
        found = _signatures(header.cluster)[: len(devices)]
        if found != devices or not _has_settings(header, wanted):
            continue
        if header.status == "ok":
            return ""
        if header.status != "running":
            reason = header.reason.partition("\n")[0] or header.status
            return one_line(f"{workload} failed: {reason}", 400)
    return ""


def _has_settings(header: RunHeader, wanted: dict[str, Any]) -> bool:
    return all(header.config.get(name) == value for name, value in wanted.items())


def _runs(results: Path, workload: str) -> Iterator[tuple[RunHeader, Path]]:
    """Runs of a workload with their directories, newest first."""
    named = headers_in(results, f"*-{workload}-*")
    found = [(header, path) for path, header in named if header.workload == workload]
    yield from sorted(found, key=lambda item: item[0].start_utc, reverse=True)


def only_devices(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """The cluster of some devices, by ascending position, and the links among them; devices are
    named as a launch on them names them."""
    part, replace = cluster.part(ranks), msgspec.structs.replace
    names = {d.name: f"{node.name}:{k}" for node in part.nodes for k, d in enumerate(node.devices)}
    nodes = [
        replace(node, devices=[replace(d, name=names[d.name]) for d in node.devices])
        for node in part.nodes
    ]
    links = [
        replace(link, source=names[link.source], target=names[link.target]) for link in part.links
    ]
    return replace(part, nodes=nodes, links=links)


def _positions(measured: Cluster, wanted: Cluster) -> list[int]:
    """Positions of the wanted devices among the measured ones, in order; empty if one lacks."""
    left = list(enumerate(_signatures(measured)))
    found: list[int] = []
    for signature in _signatures(wanted):
        at = next((k for k, (_, known) in enumerate(left) if known == signature), None)
        if at is None:
            return []
        found.append(left[at][0])
        left = left[at + 1 :]
    return found


def is_complete(config: dict[str, Any]) -> bool:
    """Whether a links run measured all sizes and all-reduce, over the transport of training."""
    is_narrow = config.get("sizes") or config.get("pair_sizes")
    is_of_training = config.get("transport") != "mpi"
    operations = config.get("operations", ["all_reduce"])
    has_sums = isinstance(operations, list) and "all_reduce" in operations
    return config.get("measure", "all") == "all" and is_of_training and has_sums and not is_narrow


def find_cluster(results: Path, wanted: Cluster) -> Cluster | None:
    """Load the newest measured cluster that has these devices; None if there is none.

    Links runs that measured only some sizes, operations or transports are ignored.

    Args:
        wanted: this launch's cluster, without links.
    """
    for header, path in finished_runs(results, "links"):
        positions = _positions(header.cluster, wanted)
        if not positions or not is_complete(header.config):
            continue
        try:
            return only_devices(Cluster.load(path / CLUSTER_FILE), positions)
        except HarnessError:
            continue
    return None


def has_profiled(
    results: Path,
    wanted: dict[str, Any],
    cluster: Cluster,
    *,
    file: Path,
    parts: Sequence[int],
    code: str = "",
) -> bool:
    """Whether a profile run with these settings has ended ok on these kinds of device.

    Args:
        wanted: settings that its configuration must have.
        file: the profile, which must still exist.
        parts: batch sizes that the profile must hold for each kind of device.
        code: hash of the user's own code that it must have profiled.
    """
    kinds = {device.kind for device in cluster.devices}
    return _has_samples(file, kinds, parts) and any(
        kinds <= {device.kind for device in header.cluster.devices}
        and _has_settings(header, wanted)
        and header.summary.get("code_digest", "") == code
        for header, _ in finished_runs(results, "profile")
    )


def _has_samples(file: Path, kinds: Iterable[str], parts: Iterable[int]) -> bool:
    try:
        points = Profile.load(file).measurements
    except HarnessError:
        return False  # missing, or malformed: then the profile run reports the error
    known = {(point.device_kind, point.shape.get("sample")) for point in points}
    return known >= set(product(kinds, parts))


def load_plan(run_dir: Path) -> tuple[Strategy, Prediction] | None:
    """Load a run's strategy and prediction; None if either is missing or unreadable."""
    try:
        strategy = Strategy.load(run_dir / STRATEGY_FILE)
        return strategy, Prediction.load(run_dir / PREDICTION_FILE)
    except HarnessError:
        return None


def write_plan(run_dir: Path, strategy: Strategy, prediction: Prediction | None) -> None:
    """Write a run's strategy, and its prediction if there is one."""
    write_atomically(run_dir / STRATEGY_FILE, strategy.to_json())
    if prediction is not None:
        write_atomically(run_dir / PREDICTION_FILE, prediction.to_json())


def find_plan(
    results: Path, run: RunHeader, made_for: MadeFor, *, any_profile: bool = False
) -> tuple[Strategy, Prediction] | None:
    """Load the plan of an earlier repeat for the same model, profile, cluster and commit.

    The commit counts because other code may predict or train differently.

    Args:
        any_profile: accept a plan made with an older profile, since runs may add shapes to it.
    """
    for header, path in finished_runs(results, "train"):
        is_repeat = (header.key, header.commit) == (run.key, run.commit)
        found = load_plan(path) if is_repeat else None
        if found is None:
            continue
        planned_for = found[0].made_for
        if any_profile:
            planned_for = msgspec.structs.replace(planned_for, profile_hash=made_for.profile_hash)
        if planned_for == made_for:
            return found
    return None


def find_search(
    results: Path,
    config: dict[str, Any],
    cluster: Cluster,
    made_for: MadeFor | None = None,
    commit: str | None = None,
) -> tuple[Strategy, Prediction] | None:
    """Load the plan of the newest search with these flags.

    Args:
        cluster: this launch's cluster, without links.
        made_for: fingerprint that the strategy must carry; None accepts any.
        commit: commit of the code that must have planned it; None accepts any.
    """
    for header, path in finished_runs(results, "search"):
        if header.config != config or _signatures(header.cluster) != _signatures(cluster):
            continue
        if commit not in (None, header.commit):
            continue
        found = load_plan(path)
        if found is not None and made_for in (None, found[0].made_for):
            return found
    return None

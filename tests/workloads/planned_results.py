"""A directory of results that holds what planning reads: measured links, a profile, its graph."""

from pathlib import Path

import msgspec
from made_runs import local_header

from harness.domain.cluster import CLUSTER_FILE, Cluster
from harness.domain.profile import OptimizerTime
from harness.measure.store import write_header
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.workloads.common.contract import config_json
from harness.workloads.planning.config import SearchConfig
from harness.workloads.planning.inputs import capture_graph

KIND = "test device"
RATES = DeviceRates(flops_per_s=2e10, memory_bytes_per_s=5e9)


def launched_cluster(size: int) -> Cluster:
    """As a launch describes the ranks of a test."""
    return local_header([f"node{i}" for i in range(size)]).cluster


def measured_cluster(size: int) -> Cluster:
    """As the links workload writes it for the ranks of a test: 1 Gbit/s, 0.1 ms."""
    return Cluster.uniform(
        size, 1, inside_bytes_per_s=125e6, memory_bytes=4 << 30, kind=KIND, latency_s=1e-4
    )


def write_links(results: Path, size: int, *, start_utc: str = "", rate: float = 1.0) -> Path:
    """A finished links run over so many ranks; its directory."""
    header = local_header([f"node{i}" for i in range(size)])
    path = results / f"run{start_utc}-links-{size}"
    told = {"run_id": path.name, "workload": "links", "start_utc": start_utc or header.start_utc}
    write_header(path, msgspec.structs.replace(header, **told))
    cluster = measured_cluster(size)
    links = [
        msgspec.structs.replace(link, bandwidth_bytes_per_s=rate * link.bandwidth_bytes_per_s)
        for link in cluster.links
    ]
    (path / CLUSTER_FILE).write_bytes(msgspec.structs.replace(cluster, links=links).to_json())
    return path


def write_inputs(
    results: Path, search_config: SearchConfig, size: int, rates: DeviceRates = RATES
) -> None:
    """Finished links and profile runs, as planning needs them."""
    write_links(results, size)
    write_profile(results, search_config, size, rates)


def write_profile(
    results: Path, search_config: SearchConfig, size: int, rates: DeviceRates = RATES
) -> None:
    """A finished profile run, its times by FLOPs and bytes."""
    profile = roofline_profile(
        capture_graph(search_config),
        {KIND: rates},
        n_parts=range(1, size + 1),
        n_microbatches=(1, 2, 4),
    )
    config = search_config.profile_config()
    config.path(results).write_bytes(
        msgspec.structs.replace(
            profile,
            model=search_config.model,
            optimizers=[
                OptimizerTime(
                    device_kind=KIND,
                    optimizer=search_config.optimizer_options().variant,
                    s_per_byte=8 / rates.memory_bytes_per_s,
                )
            ],
        ).to_json()
    )
    header = local_header([f"node{i}" for i in range(size)])
    told = {"run_id": "run-profile-0", "workload": "profile", "config": config_json(config)}
    write_header(results / "run-profile-0", msgspec.structs.replace(header, **told))

"""The header of a run."""

from __future__ import annotations

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.run import RankInfo, RunHeader, device_names

CLUSTER = Cluster.uniform(1, 1, inside_bytes_per_s=1e9, memory_bytes=2**30)


def test_devices_are_named_by_host_and_place_on_it() -> None:
    ranks = [
        RankInfo(rank=rank, hostname=host, device="", device_kind="", n_cores=1, memory_bytes=1)
        for rank, host in enumerate("abab")
    ]
    names = {0: "a:0", 1: "b:0", 2: "a:1", 3: "b:1"}
    assert device_names(ranks) == device_names(reversed(ranks)) == names


def test_an_ending_is_one_line() -> None:
    header = RunHeader(
        run_id="a", workload="train", key="k", repeat=0, argv=[], config={}, cluster=CLUSTER,
        ranks=[], versions={}, commit="c", start_utc="",
    )  # fmt: skip
    traced = msgspec.structs.replace(header, status="crash", reason="rank 0 (a): no\nTraceback")
    assert (traced.ending, header.ending) == ("crash: rank 0 (a): no", "running")

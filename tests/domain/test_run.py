"""The header of a run."""

import msgspec
from made_runs import header_of

from harness.domain.run import RankInfo, device_names


def test_devices_are_named_by_host_and_place_on_it():
    ranks = [
        RankInfo(rank=rank, hostname=host, device="", device_kind="", n_cores=1, memory_bytes=1)
        for rank, host in enumerate("abab")
    ]
    names = {0: "a:0", 1: "b:0", 2: "a:1", 3: "b:1"}
    assert device_names(ranks) == device_names(reversed(ranks)) == names


def test_an_ending_is_one_line():
    header = header_of()
    traced = msgspec.structs.replace(header, status="crash", reason="rank 0 (a): no\nTraceback")
    assert (traced.ending, header.ending) == ("crash: rank 0 (a): no", "running")

"""Settings of ranks that differ between hosts, and between runs."""

import msgspec
from made_runs import header_of

from harness.measure.derive.doubts import rank_settings


def test_settings_name_the_hosts_and_are_told_where_they_change_between_runs():
    ring, tree = {"kernel": "6.1", "NCCL_ALGO": "Ring"}, {"kernel": "6.1", "NCCL_ALGO": "Tree"}
    other = {"kernel": "6.5"}

    def header(*of_ranks):
        made = header_of(["a", "b"])
        ranks = [
            msgspec.structs.replace(rank, settings=found)
            for rank, found in zip(made.ranks, of_ranks, strict=True)
        ]
        return msgspec.structs.replace(made, ranks=ranks)

    assert rank_settings([header({}, {})]) == []
    assert rank_settings([header(ring, other), header(ring, other), header({}, {})]) == [
        ("NCCL_ALGO", "Ring (a); not set (b)", False),
        ("kernel", "6.1 (a); 6.5 (b)", False),
    ]
    assert rank_settings([header(ring, ring), header(tree, ring), header(tree, ring)]) == [
        ("NCCL_ALGO", "Ring (a, b); Tree (a)", True),
        ("kernel", "6.1", False),
    ]

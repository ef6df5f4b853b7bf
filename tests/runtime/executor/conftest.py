"""Fixtures of the executor's tests on several ranks."""

import pytest


@pytest.fixture(scope="session")
def ranks():
    """Ranks of every number, each started when first needed; see equivalence_check.py."""
    from equivalence_check import RanksBySize

    with RanksBySize() as started:
        yield started


@pytest.fixture(scope="session")
def gpu_ranks():
    """Ranks that share a GPU."""
    from equivalence_check import RanksBySize

    with RanksBySize("cuda:0") as started:
        yield started

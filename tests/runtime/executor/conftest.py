"""Fixtures of the executor's tests on several ranks."""

import pytest


def _started(device):
    """Ranks of every number, each started when first needed; see equivalence_check.py."""
    from equivalence_check import RanksBySize

    with RanksBySize(device) as started:
        yield started


@pytest.fixture(scope="session")
def ranks():
    yield from _started("cpu")


@pytest.fixture(scope="session")
def nccl_ranks():
    """Ranks under NCCL's rules; see nccl_rules.py."""
    yield from _started("nccl_rules")


@pytest.fixture(scope="session")
def gpu_ranks():
    """Ranks that share a GPU."""
    yield from _started("cuda:0")

"""Fixtures of the workloads' tests."""

import sys
from pathlib import Path

import pytest

# Spawned ranks import functions of these tests by name, and inherit this path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def run_on_ranks():
    """Runs an importable function on n local ranks over gloo; see local_ranks.py."""
    import local_ranks

    return local_ranks.run_on_ranks

"""Directories of runs on five unlike nodes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from measured_runs import fill
from planned_runs import fill_planned


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    """The directory of `fill_planned`; tests must not write into it."""
    return fill_planned(tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """The directory of `fill`; tests must not write into it."""
    return fill(tmp_path_factory.mktemp("results"))

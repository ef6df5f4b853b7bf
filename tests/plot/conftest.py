"""Directories of runs on five unlike nodes, and the functions that write them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from measured_runs import (
    fill,
    links_records,
    make_cluster,
    make_header,
    matmul_records,
    train_config,
    training_records,
    write_run,
)
from planned_runs import fill_planned


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    """The directory of `fill_planned`; tests must not write into it."""
    return fill_planned(tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """The directory of `fill`; tests must not write into it."""
    return fill(tmp_path_factory.mktemp("results"))


@pytest.fixture
def write():
    return write_run


@pytest.fixture
def header():
    return make_header


@pytest.fixture
def cluster():
    return make_cluster


@pytest.fixture
def trained():
    return training_records


@pytest.fixture
def configured():
    return train_config


@pytest.fixture
def linked():
    return links_records


@pytest.fixture
def multiplied():
    return matmul_records

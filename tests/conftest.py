"""Fixtures for tests of several packages: ranks, a small disk, and restored process state."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests of several packages share modules beside this one.
sys.path.insert(0, str(Path(__file__).parent))
# Several tests and their ranks share the cores; threads of one would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# All tests but those marked gpu run on the CPU, also on a machine with GPUs.
os.environ.setdefault("FIRST_GPU", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tests name hosts that do not exist; a name server that drops questions delays each by 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
    os.environ.setdefault(name, "1")

# Otherwise, as in many containers, each worker compiles the tests anew, and each rank the harness.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Most objects are those of torch and the tests, which stay: by default, looking for garbage among
# them takes a tenth of the time.
gc.disable()  # during the collection of tests
gc.set_threshold(20_000)

# Tests run side by side, so an example's time says nothing.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# The longest files. xdist gives a worker a second file at once while it has few tests, so a short
# one follows the newcomer's single test.
_FIRST = ("test_newcomer.py", "test_survival.py", "test_launch.py", "test_start.py")


def pytest_collection_modifyitems(items):
    """Start with the files that start ranks, which take longest, so that workers end together."""
    place = {name: k for k, name in enumerate(_FIRST)}
    by_mpirun = {item.path for item in items if item.get_closest_marker("mpi")}
    forked = {
        item.path
        for item in items
        if hasattr(item.module, "run_on_ranks") or "ranks" in getattr(item, "fixturenames", ())
    }
    items.sort(
        key=lambda item: (
            place.get(item.path.name, len(_FIRST)),
            item.path not in by_mpirun,
            item.path not in forked,
        )
    )


def pytest_collection_finish():
    """Leave what the collection has imported out of garbage collections, and out of the search for
    caches by captures; in workers also what torch imports when it first exports."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _unchanged_process():
    """Restore environment and signal handlers after each test, for processes of later tests."""
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if os.environ != environ:
        os.environ.clear()
        os.environ.update(environ)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _started(device):
    """Ranks of every number, each started when first needed; see equivalence_check.py."""
    from equivalence_check import RanksBySize

    with RanksBySize(device) as started:
        yield started


@pytest.fixture(scope="session")
def _cpu_ranks():
    yield from _started("cpu")


@pytest.fixture(scope="session")
def ranks(_cpu_ranks):
    return _cpu_ranks


@pytest.fixture(scope="session")
def nccl_ranks(_cpu_ranks):
    return _cpu_ranks.under_nccl_rules()


@pytest.fixture(scope="session")
def gpu_ranks():
    """Ranks that share a GPU."""
    yield from _started("cuda:0")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, which needs root to mount."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    subprocess.run(mount, check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)

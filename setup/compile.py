"""Compile the planner and the imported modules at installation, to make later starts faster.

The loops of the simulator and of the search for pipelines are cached, which takes half a minute.
Bytecode is written by importing the modules of ranks and figures, because installers leave that to
the first start, or, with PYTHONDONTWRITEBYTECODE as in many containers, to every start.
"""

from __future__ import annotations

import compileall
import importlib
from pathlib import Path

import harness
from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.plan import builders
from harness.plan.search.pipelines import PipelineSearch
from harness.plan.simulate.simulator import Simulator, Trial

_IMPORTED = (
    "harness.__main__",
    "harness.launch",
    "harness.plot.__main__",
    "harness.workloads",
    "harness.runtime.executor.engine",
    "harness.runtime.models.preload_torchvision",
    "harness.plot.report",
    "pandas",
    "scipy.stats",
)


def compile_imports() -> None:
    """Write the bytecode of the harness, and of the libraries that ranks and figures import."""
    compileall.compile_dir(Path(harness.__file__).parent, quiet=2)
    for name in _IMPORTED:
        importlib.import_module(name)


def compile_planner() -> None:
    """Plan one layer on two devices; the compiled code serves every model."""
    shape = {"sample": 4, "feature": 4}
    graph = Graph(
        name="one layer",
        batch=4,
        operators=[
            Operator(name="x", kind="input", shape=shape),
            Operator(name="layer", kind="linear", inputs=["x"], shape=shape, parameter_bytes=64),
        ],
    )
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=1 << 30)
    time = Measurement(
        device_kind="device", operator="layer", shape=shape, forward_s=1.0, backward_s=1.0
    )
    profile = Profile(model="one layer", measurements=[time])
    simulator = Simulator(graph, profile, cluster)
    Trial(simulator, builders.ddp(graph, cluster, 4)).outcome()
    PipelineSearch(simulator, 4, 1).candidates(1)


if __name__ == "__main__":
    compile_imports()
    compile_planner()

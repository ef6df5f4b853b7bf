"""Compile once what every start would compile again otherwise.

The simulator's event loops go into the cache beside their source, which takes half a minute. The
bytecode of what a rank imports is written by importing it: installers leave that to the first
start, and where PYTHONDONTWRITEBYTECODE is set, as in many containers, to every one.
"""

from __future__ import annotations

import importlib

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.plan import builders
from harness.plan.simulate.simulator import Simulator, compile_events

_IMPORTED = (
    "harness.__main__",
    "harness.launch",
    "harness.plot.__main__",
    "harness.workloads",
    "harness.runtime.executor.engine",
    "harness.runtime.models.preload_torchvision",
)


def compile_imports() -> None:
    """Write the bytecode of what ranks import."""
    for name in _IMPORTED:
        importlib.import_module(name)


def compile_simulator() -> None:
    """Simulate one layer on two devices; what is compiled fits every model."""
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
    compile_events(Simulator(graph, profile, cluster), builders.ddp(graph, cluster, 4))


if __name__ == "__main__":
    compile_imports()
    compile_simulator()

"""Profiles of graphs by hand, for tests of several packages."""

from __future__ import annotations

from collections.abc import Mapping

from harness.domain.graph import Graph
from harness.domain.profile import Measurement, Profile

Seconds = tuple[float, float]


def profile_of(
    graph: Graph, seconds: Seconds | Mapping[str, Seconds] = (1.0, 2.0), kind: str = "device"
) -> Profile:
    """Forward and backward of each operator on one kind of device.

    Args:
        seconds: by operator, or of all but the first, which is the input.
    """
    if isinstance(seconds, tuple):
        seconds = {operator.name: seconds for operator in graph.operators[1:]}
    shapes = {operator.name: operator.shape for operator in graph.operators}
    points = [
        Measurement(device_kind=kind, operator=name, shape=shapes[name], forward_s=f, backward_s=b)
        for name, (f, b) in seconds.items()
    ]
    return Profile(model=graph.name, measurements=points)

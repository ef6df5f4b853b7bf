"""A model as a chain of layers, with times measured by others: its graph and its profile.

A layer is one operator of kind `block`: tensor parallelism cuts it by heads, each part holds a
share of the weights, and the parts of its output are added up, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.domain.graph import Attribute, Graph, Operator
from harness.domain.partition import SAMPLE
from harness.domain.profile import Measurement, Profile
from harness.domain.sharding import HEADS
from harness.errors import GraphError
from harness.plan.simulate.network import Network


class PlannedLayer(NamedTuple):
    """One layer of a chain.

    Attributes:
        parameter_bytes: of the whole layer.
        output_bytes: of one sample.
        saved_bytes: that forward keeps for backward beside the output, of one sample.
        tied_to: layer whose weights it shares; empty if none.
    """

    name: str
    parameter_bytes: int
    output_bytes: int
    saved_bytes: int = 0
    tied_to: str = ""


class LayerTime(NamedTuple):
    """Seconds of one layer for one microbatch on each device of a tensor-parallel group."""

    forward_s: float
    backward_s: float


class TimeKey(NamedTuple):
    """The key of a layer time.

    Attributes:
        samples: in the microbatch of the group.
        tp: devices of the group.
    """

    device_kind: str
    samples: int
    tp: int = 1


LayerTimes = Mapping[TimeKey, Sequence[LayerTime]]


def chain_graph(name: str, layers: Sequence[PlannedLayer], batch: int, n_parts: int = 1) -> Graph:
    """Layers that each read the one before.

    Args:
        n_parts: most devices of a tensor-parallel group.
    """
    operators = [
        Operator(
            name=layer.name,
            kind="block",
            inputs=[layers[k - 1].name] if k else [],
            shape={SAMPLE: batch},
            parameter_bytes=0 if layer.tied_to else layer.parameter_bytes,
            activation_bytes=layer.output_bytes * batch,
            attrs=_attrs(layer, batch, n_parts),
        )
        for k, layer in enumerate(layers)
    ]
    return Graph(name=name, operators=operators, batch=batch)


def _attrs(layer: PlannedLayer, batch: int, n_parts: int) -> dict[str, Attribute]:
    attrs: dict[str, Attribute] = {}
    if n_parts > 1:
        attrs["n_heads"] = n_parts
    if layer.saved_bytes:
        attrs["saved_bytes"] = layer.saved_bytes * batch
    if layer.tied_to:
        attrs |= {"tied_to": layer.tied_to, "tied_bytes": layer.parameter_bytes}
    return attrs


def layer_profile(graph: Graph, times: LayerTimes, *, source: str = "") -> Profile:
    """Measurements of all layers of a chain.

    Raises:
        GraphError: a list of times has another length than the chain.
    """
    points = []
    for key, row in times.items():
        if len(row) != len(graph.operators):
            raise GraphError(
                f"{graph.name!r} has {len(graph.operators)} layers, the times of {key.device_kind} "
                f"at tp {key.tp} and {key.samples} samples are of {len(row)}: give one per layer"
            )
        for operator, time in zip(graph.operators, row, strict=True):
            shape = {SAMPLE: key.samples}
            if key.tp > 1:
                shape[HEADS] = n_parts_of(operator) // key.tp
            points.append(
                Measurement(
                    device_kind=key.device_kind,
                    operator=operator.profile_key,
                    shape=shape,
                    forward_s=time.forward_s,
                    backward_s=time.backward_s,
                )
            )
    provenance = {"source": source} if source else {}
    return Profile(model=graph.name, measurements=points, provenance=provenance)


def n_parts_of(operator: Operator) -> int:
    """Most devices among which tensor parallelism divides a layer."""
    n = operator.attrs.get("n_heads", 1)
    return n if isinstance(n, int) else 1


def without_collectives(
    graph: Graph,
    network: Network,
    group: tuple[int, ...],
    key: TimeKey,
    row: Sequence[LayerTime],
    *,
    recomputes: bool = False,
) -> list[LayerTime]:
    """Take off the all-reduces that times measured under tensor parallelism include.

    The simulator adds what it predicts for them: one after each layer but the last, and one of its
    gradient. Longer ones than the layer's time leave nothing.

    Args:
        recomputes: the times are of a model that is recomputed. Recomputation repeats the first of
            the two, which the simulator does not, so it stays in backward.
    """
    if key.tp == 1:
        return list(row)
    found = []
    for k, (operator, time) in enumerate(zip(graph.operators, row, strict=True)):
        n_bytes = operator.activation_bytes * key.samples // (graph.batch or 1)
        after = sum_seconds(network, group, n_bytes) if k + 1 < len(row) else 0.0
        before = graph.operators[k - 1].activation_bytes * key.samples // (graph.batch or 1)
        back = sum_seconds(network, group, before) if k else 0.0
        back -= after * recomputes
        found.append(LayerTime(max(0.0, time.forward_s - after), max(0.0, time.backward_s - back)))
    return found


def sum_seconds(network: Network, group: tuple[int, ...], n_bytes: int) -> float:
    """Seconds of adding up an output over a group: two devices exchange it, more all-reduce it."""
    if len(group) == 2:
        a, b = group
        return max(network.transfer_s(a, b, n_bytes), network.transfer_s(b, a, n_bytes))
    return network.all_reduce(group, n_bytes).duration_s

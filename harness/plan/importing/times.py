"""Times of layers and of operators that others measured, as a graph and its profile.

layer,tp,microbatch,forward_s,backward_s,device_kind,parameter_bytes,output_bytes,saved_bytes
    embedding,1,4,0.0004,0.0008,A100,209715200,4194304,0

The last four columns of a table of layers may be missing, others are refused. Bytes are of the
whole layer, and of one sample's output. A layer is one operator of kind `block`: tensor parallelism
cuts it by heads, each part holds a share of the weights, and the parts of its output are added up,
forward and backward.

The columns of a table of operators are those of NeuSight's tables of torch.fx graphs; `users`,
shapes and the rest are not needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.domain.graph import Attribute, Graph, Operator
from harness.domain.partition import SAMPLE
from harness.domain.profile import Measurement, Profile
from harness.domain.sharding import HEADS
from harness.errors import DataError, GraphError
from harness.inputs import MOST_S, find_number, shorten
from harness.plan.importing.tables import Row, read_table
from harness.plan.simulate.network import Network
from harness.units import format_duration

_COLUMNS = ("layer", "tp", "microbatch", "forward_s", "backward_s")
_KIND, *_BYTES = _OPTIONAL = ("device_kind", "parameter_bytes", "output_bytes", "saved_bytes")
_MOST_SAMPLES = 2**31
_MOST_PARTS = 2**20


def read_layer_times(
    path: Path, *, device_kind: str
) -> tuple[Graph, dict[TimeKey, list[LayerTime]]]:
    """The chain of a model's layers, and their times.

    Args:
        device_kind: of rows that name none.

    Raises:
        DataError: it is no such table, has another column, or a layer has no time at some degree
            and microbatch.
    """
    rows = read_table(path, _COLUMNS, _OPTIONAL)
    unknown = [name for name in rows[0].columns if name not in (*_COLUMNS, *_OPTIONAL, "")]
    if unknown:  # perhaps misspelt, and what it says would be lost
        raise DataError(
            f"{path} has a column {shorten(unknown[0])}, which is none of "
            f"{', '.join((*_COLUMNS, *_OPTIONAL))}: rename or remove it"
        )
    layers: dict[str, PlannedLayer] = {}
    times: dict[TimeKey, dict[str, LayerTime]] = {}
    for row in rows:
        layer = _layer(row)
        known = layers.setdefault(layer.name, layer)
        if known != layer:
            raise DataError(
                f"{row.where}: layer {layer.name!r} has other bytes than in an earlier row: make "
                "them equal"
            )
        kind = row.text(_KIND) if _KIND in row.columns else ""
        samples, tp = row.count("microbatch", 1, _MOST_SAMPLES), row.count("tp", 1, _MOST_PARTS)
        key = TimeKey(kind or device_kind, samples, tp)
        own = times.setdefault(key, {})
        if layer.name in own:
            raise DataError(
                f"{row.where}: layer {layer.name!r} has two times on {key.device_kind} at tp "
                f"{key.tp}, microbatch {key.samples}: keep one"
            )
        own[layer.name] = LayerTime(row.number("forward_s"), row.number("backward_s"))
    for key, own in times.items():
        missing = next((name for name in layers if name not in own), None)
        if missing is not None:
            raise DataError(
                f"{path}: layer {missing!r} has no time on {key.device_kind} at tp {key.tp}, "
                f"microbatch {key.samples}: add it, or leave out the others"
            )
    graph = chain_graph(path.stem, list(layers.values()), 1, _n_parts(times))
    return graph, {key: [own[name] for name in layers] for key, own in times.items()}


def _layer(row: Row) -> PlannedLayer:
    if not row.text("layer"):
        raise DataError(f"{row.where}: layer is empty: name it")
    parameters, output, saved = (
        row.count(name, 0) if name in row.columns and row.text(name) else 0 for name in _BYTES
    )
    return PlannedLayer(row.text("layer"), parameters, output, saved)


def _n_parts(times: dict[TimeKey, list[LayerTime]] | dict[TimeKey, dict[str, LayerTime]]) -> int:
    """The least number of parts that every degree divides."""
    n = math.lcm(*(key.tp for key in times))
    if n > _MOST_PARTS:
        degrees = ", ".join(map(str, sorted({key.tp for key in times})))
        raise DataError(
            f"a layer in parts of tp {shorten(degrees)} needs {n} heads, {_MOST_PARTS} are the "
            "most: leave out some degrees"
        )
    return n


_NAME, _FORWARD, _BACKWARD = "Name", "fw_latency", "bw_latency"
# Producers and modules; a table may lack them.
_INPUTS, _META = "_input_nodes", "meta"
_FEWEST_TIMES, _MOST_TIMING_S, _MOST_SHARE = 20, 1e-4, 0.5
TAKEN_OFF = "taken_off"  # in the provenance: what timing an operator takes
_MOST_MS = MOST_S * 1e3


def read_operators(
    path: Path, *, device_kind: str, batch: int, n_layers: int = 1
) -> tuple[Graph, Profile]:
    """A graph, and the times of its operators for the whole batch.

    Args:
        n_layers: layers of the model. If the table holds one of them (operators whose module is
            numbered, such as `encoder.layer.0.dense`), it stands for all.

    Raises:
        DataError: it is no such table.
        GraphError: the operators are inconsistent.
    """
    rows = read_table(path, (_NAME, _FORWARD, _BACKWARD), (_INPUTS, _META))
    numbers = [_layer_of(row) for row in rows]
    floors = [_floor(rows, column) for column in (_FORWARD, _BACKWARD)]
    n_numbered = len({n for n in numbers if n is not None})
    if n_layers > 1 and not n_numbered:
        raise DataError(
            f"{path} does not say which operators are of a layer ({_META}), and the model has "
            f"{n_layers} layers: add that column, or give a table of all layers and no number"
        )
    if n_layers > 1 < n_numbered != n_layers:
        raise DataError(
            f"{path} has operators of {n_numbered} layers, and the model has {n_layers}: give a "
            "table of one layer, or of all"
        )
    n_copies = n_layers if n_numbered == 1 else 1
    operators: list[Operator] = []
    points: list[Measurement] = []
    known: dict[str, str] = {}  # the last operator of each name of the table
    names = {_name_of(row) for row in rows}
    layer = {row.text(_NAME): n for row, n in zip(rows, numbers, strict=True) if n is not None}
    for copy, row in _unrolled(rows, numbers, n_copies):
        name = row.text(_NAME) + (f".{copy}" if copy else "")
        producers = _producers(row)
        later = next((one for one in producers if one in names and one not in known), None)
        if later is not None:
            raise DataError(
                f"{row.where}: {shorten(name)} reads {shorten(later)}, which is no row above: "
                "write producers first"
            )
        inputs = [known[one] for one in producers if one in known]
        if copy and not any(one in layer for one in producers):
            inputs.append(known[next(reversed(layer))])  # a layer reads the one before
        operators.append(Operator(name=name, kind="other", inputs=inputs))
        forward_s, backward_s = (
            max(0.0, _seconds(row, column) - floor)
            for column, floor in zip((_FORWARD, _BACKWARD), floors, strict=True)
        )
        points.append(
            Measurement(
                device_kind=device_kind, operator=name, forward_s=forward_s, backward_s=backward_s
            )
        )
        known[row.text(_NAME)] = name
    graph = Graph(name=path.stem, operators=operators, batch=batch)
    provenance = {"source": str(path)}
    if any(floors):
        forward, backward = map(format_duration, floors)
        provenance[TAKEN_OFF] = f"{forward} of its forward and {backward} of its backward"
    return graph, Profile(model=graph.name, measurements=points, provenance=provenance)


def _name_of(row: Row) -> str:
    if not row.text(_NAME):
        raise DataError(f"{row.where}: {_NAME} is empty: name the operator")
    return row.text(_NAME)


def _unrolled(
    rows: list[Row], numbers: list[int | None], n_copies: int
) -> Iterator[tuple[int, Row]]:
    """Rows with the number of their copy: those of the numbered layer several times."""
    layer = [row for row, number in zip(rows, numbers, strict=True) if number is not None]
    is_written = False
    for row, number in zip(rows, numbers, strict=True):
        if number is None:
            yield 0, row
        elif not is_written:
            is_written = True
            yield from ((copy, one) for copy in range(n_copies) for one in layer)


def _layer_of(row: Row) -> int | None:
    """Number of its layer, from the innermost module of `meta`; None outside layers."""
    if _META not in row.columns:
        return None
    modules = re.findall(r"'([\w.]+)', <class", row.text(_META))
    found = re.search(r"\.(\d{1,6})(?:\.|$)", modules[-1]) if modules else None
    return None if found is None else int(found[1])


def _floor(rows: Sequence[Row], column: str) -> float:
    """The shortest time: that of timing an operator without a kernel, such as a view. 0 in a table
    of few operators, which may have none, and where it is too long for that."""
    times = [seconds for row in rows if (seconds := _seconds(row, column)) > 0]
    floor = min(times, default=0.0)
    is_timing = floor <= _MOST_TIMING_S and floor * len(times) <= _MOST_SHARE * sum(times)
    return floor if is_timing and len(times) >= _FEWEST_TIMES else 0.0


def _seconds(row: Row, column: str) -> float:
    """Milliseconds as seconds; an empty cell is 0."""
    text = row.text(column) or "0"
    value = find_number(text, least=0.0, at_most=_MOST_MS)
    if value is None:
        raise GraphError(f"{row.where}: {column} is {text!r}: write milliseconds >= 0")
    return value / 1e3


def _producers(row: Row) -> list[str]:
    """Names in a dict such as {a: None, b: None}."""
    if _INPUTS not in row.columns:
        return []
    return re.findall(r"(?<![\w.])([\w.]++)\s*+:", row.text(_INPUTS))


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
    """The key of a layer time: samples in the microbatch of a tensor-parallel group; its size."""

    device_kind: str
    samples: int
    tp: int = 1


def chain_graph(name: str, layers: Sequence[PlannedLayer], batch: int, n_parts: int = 1) -> Graph:
    """Layers that each read the one before, which tensor parallelism cuts into up to `n_parts`."""
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


def layer_profile(
    graph: Graph, times: Mapping[TimeKey, Sequence[LayerTime]], *, source: str = ""
) -> Profile:
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
            if key.tp > 1 and isinstance(n_parts := operator.attrs.get("n_heads", 1), int):
                shape[HEADS] = n_parts // key.tp
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


def add_uncut(times: dict[TimeKey, list[LayerTime]]) -> dict[str, int]:
    """Add the times at tp 1 of each kind of device that has none: those of all its parts at its
    lowest tp, one after another.

    Returns:
        That tp, by kind.
    """
    lowest: dict[str, int] = {}
    for key in times:
        lowest[key.device_kind] = min(key.tp, lowest.get(key.device_kind, key.tp))
    for key in list(times):
        if 1 < key.tp == lowest[key.device_kind]:
            times[key._replace(tp=1)] = [
                LayerTime(key.tp * time.forward_s, key.tp * time.backward_s) for time in times[key]
            ]
    return {kind: tp for kind, tp in lowest.items() if tp > 1}


def without_collectives(
    graph: Graph,
    network: Network,
    key: TimeKey,
    row: Sequence[LayerTime],
    *,
    recomputes: bool = False,
) -> list[LayerTime]:
    """Take off the all-reduces that times measured under tensor parallelism include.

    The simulator adds what it predicts for them on the first devices: one after each layer but the
    last, and one of its gradient. Longer ones than the layer's time leave nothing.

    Args:
        recomputes: the times are of a model that is recomputed. Recomputation repeats the first of
            the two, which the simulator does not, so it stays in backward.
    """
    if key.tp == 1:
        return list(row)
    found, group = [], tuple(range(key.tp))
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

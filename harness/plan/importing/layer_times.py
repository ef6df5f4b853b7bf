"""Times of layers by kind of device, degree of tensor parallelism and microbatch: a CSV file.

    layer,tp,microbatch,forward_s,backward_s,device_kind,parameter_bytes,output_bytes,saved_bytes
    embedding,1,4,0.0004,0.0008,A100,209715200,4194304,0

The last four columns may be missing. Bytes are of the whole layer, and of one sample's output.
"""

from __future__ import annotations

from pathlib import Path

from harness.domain.graph import Graph
from harness.errors import DataError
from harness.plan.importing.tables import Row, read_table
from harness.plan.layers import LayerTime, PlannedLayer, TimeKey, chain_graph

_COLUMNS = ("layer", "tp", "microbatch", "forward_s", "backward_s")
_KIND, _PARAMETERS, _OUTPUT, _SAVED = (
    "device_kind",
    "parameter_bytes",
    "output_bytes",
    "saved_bytes",
)


def read_layer_times(
    path: Path, *, device_kind: str
) -> tuple[Graph, dict[TimeKey, list[LayerTime]]]:
    """The chain of a model's layers, and their times.

    Args:
        device_kind: of rows that name none.

    Raises:
        DataError: it is no such table, or a layer has no time at some degree and microbatch.
    """
    rows = read_table(path, _COLUMNS)
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
        key = TimeKey(kind or device_kind, row.count("microbatch"), row.count("tp"))
        own = times.setdefault(key, {})
        if layer.name in own:
            raise DataError(f"{row.where}: layer {layer.name!r} has two times at {key}: keep one")
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
    counts = {
        name: row.count(name, 0) if name in row.columns and row.text(name) else 0
        for name in (_PARAMETERS, _OUTPUT, _SAVED)
    }
    return PlannedLayer(row.text("layer"), counts[_PARAMETERS], counts[_OUTPUT], counts[_SAVED])


def _n_parts(times: dict[TimeKey, list[LayerTime]] | dict[TimeKey, dict[str, LayerTime]]) -> int:
    """A number of parts that every degree divides."""
    n = 1
    for key in times:
        if n % key.tp:
            n *= key.tp
    return n

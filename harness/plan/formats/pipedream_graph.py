"""PipeDream's graph.txt: per-operator times and sizes of one minibatch.

    node12 -- Conv2d(128, 256, ...) -- forward_compute_time=10.814, backward_compute_time=18.335,
        activation_size=411041792.000, parameter_size=1180672.000[ -- stage_id=0]     (one line)
    <TAB>node11 -- node12

Times are milliseconds, sizes bytes; an activation may be a list `[a; b]`. Also read: edges
indented by spaces, integers, trailing blanks (DAPPLE's files).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from harness.domain.graph import Attribute, Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.errors import GraphError
from harness.inputs import MOST_COUNT, MOST_S, parse_int, parse_number, shorten

_KINDS = {
    "Input": "input",
    "Conv2d": "conv2d",
    "Linear": "linear",
    "BatchNorm2d": "batch_norm",
    "ReLU": "elementwise",
    "Dropout": "elementwise",
    "Sigmoid": "elementwise",
    "Tanh": "elementwise",
    "Add": "add",
    "Concat": "cat",
    "View": "flatten",
    "Flatten": "flatten",
    "Embedding": "embedding",
    "LSTM": "lstm",
    "EmuBidirLSTM": "lstm",
    "RecurrentAttention": "attention",
    "Softmax": "softmax",
    "MaxPool2d": "pool",
    "AvgPool2d": "pool",
    "AdaptiveAvgPool2d": "pool",
}
_NAME = re.compile(r"[A-Za-z_]\w*")
_LINEAR = re.compile(r"in_features=(\w+), out_features=(\w+)")
_LIST = re.compile(r"\[[^\[\]]*\]")
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class _Node:
    """One node line; times in seconds."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    stage_id: int | None
    producers: list[str] = field(default_factory=list)


def parse_graph_txt(
    text: str,
    *,
    name: str,
    batch: int | None = None,
    device_kind: str = "device",
    source: str = "profile",
) -> tuple[Graph, Profile]:
    """Read a profile into the graph and its times on one kind of device.

    Args:
        batch: samples in the minibatch that was profiled; None when unknown.
        device_kind: of the profile; `Cluster.uniform` uses the same default.

    Raises:
        GraphError: names the line or the operators, and the error.
    """
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}:{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            edges.append((*_parse_edge(line, where), where))
            continue
        node = _parse_node(line, where)
        if node.name in nodes:
            raise GraphError(f"{where}: {shorten(node.name)} is described twice: remove one line")
        nodes[node.name] = node
    for producer, consumer, where in edges:
        for end in (producer, consumer):
            if end not in nodes:
                raise GraphError(f"{where}: an edge names unknown operator {shorten(end)}")
        nodes[consumer].producers.append(producer)
    shape = {} if batch is None else {"sample": batch}
    operators = [_operator(node, shape) for node in nodes.values()]
    points = [
        Measurement(
            device_kind=device_kind,
            operator=node.name,
            shape=shape,
            forward_s=node.forward_s,
            backward_s=node.backward_s,
        )
        for node in nodes.values()
    ]
    graph = Graph.from_unordered(name, operators, batch=batch)
    return graph, Profile(model=name, measurements=points, provenance={"source": source})


def _parse_edge(line: str, where: str) -> tuple[str, str]:
    ends = [part.strip() for part in line.split("--")]
    if len(ends) != 2 or not all(ends):
        raise GraphError(f"{where}: {shorten(line.strip())} is not an edge `producer -- consumer`")
    return ends[0], ends[1]


def _parse_node(line: str, where: str) -> _Node:
    parts = [part.strip() for part in line.strip().split(" -- ")]
    if len(parts) not in (3, 4):
        raise GraphError(
            f"{where}: a node line has 3 or 4 fields parted by ` -- `, this has {len(parts)}"
        )
    values = _values(parts[2], parts[0], where)
    numbers = {
        key: [_parse_number(item, key, parts[0], where) for item in _items(values[key])]
        for key in _FIELDS
    }
    forward_ms, backward_ms, activation_bytes, parameter_bytes = (
        sum(numbers[key]) for key in _FIELDS
    )
    return _Node(
        name=parts[0],
        description=parts[1],
        forward_s=forward_ms / 1e3,
        backward_s=backward_ms / 1e3,
        activation_bytes=activation_bytes,
        parameter_bytes=parameter_bytes,
        stage_id=_parse_stage(parts[3], where) if len(parts) == 4 else None,
    )


def _values(text: str, node: str, where: str) -> dict[str, str]:
    """The text of each of `_FIELDS`; a list's own commas are no ends of fields."""
    joined = _LIST.sub(lambda found: found[0].replace(",", ";"), text)
    parts = (item.partition("=") for item in joined.split(","))
    pairs = [(key.strip(), value) for key, _, value in parts]
    keys = [key for key, _ in pairs]
    missing = [key for key in _FIELDS if key not in keys]
    if missing:
        raise GraphError(f"{where}: {shorten(node)} lacks {', '.join(missing)}")
    other = next((key for key in keys if key not in _FIELDS or keys.count(key) > 1), None)
    if other is not None:
        raise GraphError(
            f"{where}: {shorten(node)} has {shorten(other)} beside, or more than once among, "
            f"{', '.join(_FIELDS)}: keep one of each, and no other"
        )
    return dict(pairs)


def _items(value: str) -> list[str]:
    return value.strip().strip("[]").split(";")


def _parse_number(text: str, key: str, node: str, where: str) -> float:
    is_time = key.endswith("time")
    return parse_number(
        text,
        f"{where}: {key} of {shorten(node)}",
        at_most=MOST_S if is_time else MOST_COUNT,
        error=GraphError,
        remedy="a time is in milliseconds" if is_time else "a size is in bytes",
    )


def _parse_stage(text: str, where: str) -> int | None:
    key, _, value = text.partition("=")
    if key.strip() != "stage_id":
        raise GraphError(
            f"{where}: after the sizes comes stage_id=<number>, this line has {shorten(text)}: "
            "remove it, with sizes that are the bytes which are sent"
        )
    if value.strip() == "None":
        return None
    return parse_int(value, f"{where}: stage_id", error=GraphError)


def _operator(node: _Node, shape: dict[str, int]) -> Operator:
    match = _NAME.match(node.description)
    word = match.group() if match else ""
    attrs: dict[str, Attribute] = {"description": node.description}
    if node.stage_id is not None:
        attrs["stage_id"] = node.stage_id
    linear = _LINEAR.search(node.description)
    if linear:
        for name, number in zip(("in_features", "out_features"), linear.groups(), strict=True):
            what = f"{name} of {shorten(node.name)}"
            attrs[name] = parse_int(number, what, at_least=1, error=GraphError)
    return Operator(
        name=node.name,
        kind="input" if word.startswith("Input") else _KINDS.get(word, "other"),
        inputs=node.producers,
        shape=shape,
        parameter_bytes=round(node.parameter_bytes),
        activation_bytes=round(node.activation_bytes),
        attrs=attrs,
    )

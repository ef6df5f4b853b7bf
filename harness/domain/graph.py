"""A model's operators in topological order, with shapes, FLOPs, parameter and activation bytes.

Captured from a model (`harness.runtime.capture.capture`), read from a PipeDream profile
(`harness.plan.formats.pipedream`) or written by hand as JSON (`to_json`, `from_json`).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

import msgspec

from harness.domain.einsum import check_equation
from harness.domain.files import Count, FileKind, JsonFile, Number
from harness.errors import GraphError
from harness.inputs import MOST_COUNT, is_amount, shorten

SCHEMA = "harness-graph"
SCHEMA_VERSION = 1

# Name of the operator that capture adds to every graph.
LOSS = "loss"
# Attribute of an operator: forward and backward FLOPs in products of activations with each other.
SCORE_FLOPS = "score_flops"
# Attributes of an operator: bytes that it keeps until backward, its output included, in fp32 and
# under autocast to 16 bits.
KEPT, KEPT_HALF = "kept_bytes", "kept_bytes_half"
# Bytes that its backward allocates at once beside gradients of its output, inputs and weights.
INNER, INNER_HALF = "inner_bytes", "inner_bytes_half"
_NOT_HASHED = (KEPT, KEPT_HALF, INNER, INNER_HALF)
# The least value of attributes that are sizes and of those that are amounts.
_LEAST = dict.fromkeys(
    ("in_features", "out_features", "n_heads", "n_rows", "n_classes", "n_normalized", "groups",
     "kernel", "stride", "dilation"), 1,
) | dict.fromkeys(
    (*_NOT_HASHED, SCORE_FLOPS, "saved_bytes", "tied_bytes", "frozen_bytes", "n_summed",
     "key_features", "padding"),
    0,
)  # fmt: skip

Attribute = bool | Count | Number | str | Sequence[Count | Number | str]

# Dims of an output; a partition names them.
DIM_NAMES = ("sample", "heads", "seq", "feature", "depth", "height", "width")


class Operator(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One operator and the tensor that it produces.

    Attributes:
        name: unique in the graph; the module's path when it has one.
        kind: kind of computation, lower case: input, linear, conv2d, pool, batch_norm, layer_norm,
            elementwise (relu, gelu, dropout, ...), add, cat, flatten, embedding, lstm, attention,
            softmax, einsum, router (of a mixture of experts), block (operators that were measured
            as one, such as a transformer's layer), loss, other. An `input` feeds the model, costs
            nothing and has no producer.
        inputs: the producers' names, in argument order; duplicates are allowed.
        shape: size of each named dim of the output, outermost first, such as
            {"sample": 64, "feature": 256, "height": 56, "width": 56}; empty when unknown.
        dtype: of the output, as torch names it.
        forward_flops: of the whole output; a multiply-add counts as two.
        backward_flops: gradients of inputs and parameters together.
        activation_bytes: of all that its consumers receive.
        signature: operators with equal signatures take equal time at equal shapes, so they share
            measurements; an empty signature is shared with no operator.
        attrs: attributes for partitioning: kernel, stride, padding, groups, in_features,
            out_features, n_heads, key_features (`domain.key_forms`), reads (`sharding.reads_of`),
            has_dropout (of an attention's probabilities), scores_all (of an attention whose causal
            mask is a tensor), n_rows,
            n_normalized (last dims that a layer norm runs over),
            is_cut_by_samples (false if a part of the samples cannot be computed separately),
            mixes_samples (true if a microbatch cannot either: the batch stays in one piece),
            reads_samples (false if no sample affects it, and several devices may compute it),
            writes_buffers (names of the model's buffers that it shares with others and that one
            of them writes; these operators must be on one device),
            statistics (`frozen` if a batch norm does not compute them from its input),
            shares_norm_with (the first operator whose running statistics this batch norm updates,
            too),
            equation, summed and n_summed (of an einsum: `domain.einsum`),
            is_repeatable (false if two devices may compute different values of one block),
            function (relu, add, ...), description, tied_to and tied_bytes (the first operator that
            uses some of its weights, and their bytes, which its parameter_bytes do not count),
            frozen_bytes (of its weights, also tied ones, those that are not trained); of a
            block: saved_bytes (kept for backward beside the output); of a captured operator:
            kept_bytes, kept_bytes_half, inner_bytes, inner_bytes_half.
    """

    name: str
    kind: str
    inputs: list[str] = []
    shape: dict[str, Count] = {}
    dtype: str = "float32"
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    signature: str = ""
    attrs: dict[str, Attribute] = {}

    def __post_init__(self) -> None:
        for field in ("forward_flops", "backward_flops"):
            _check(self.name, field, getattr(self, field), is_amount(getattr(self, field)), "1e30")
        for field in ("parameter_bytes", "activation_bytes"):
            is_count = 0 <= getattr(self, field) <= MOST_COUNT
            _check(self.name, field, getattr(self, field), is_count, "2**53")
        if self.kind == "einsum":
            check_equation(self)
        for dim, size in self.shape.items():
            if dim not in DIM_NAMES:
                raise GraphError(
                    f"operator {self.name!r} has an unknown dim {dim!r}: use {', '.join(DIM_NAMES)}"
                )
            if size < 1:
                raise GraphError(f"operator {self.name!r} has {dim} {size}: a size must be >= 1")
        for name in _LEAST.keys() & self.attrs.keys():
            value, least = self.attrs[name], _LEAST[name]
            parts = value if isinstance(value, list | tuple) else (value,)
            words = [part for part in parts if isinstance(part, str)]
            if (words and name != "padding") or any(p < least for p in parts if p not in words):
                raise GraphError(
                    f"operator {self.name!r} has {name} {shorten(value)}: give a number >= {least}"
                )
        if self.n_elements > MOST_COUNT:
            raise GraphError(
                f"operator {self.name!r} has shape {self.shape}: its elements must be at most 2**53"
            )

    @property
    def profile_key(self) -> str:
        """Key of its measurements: the signature, or its name if it has none."""
        return self.signature or self.name

    @property
    def tied_bytes(self) -> int:
        """Bytes of its weights that an earlier operator counts."""
        n_bytes = self.attrs.get("tied_bytes", 0)
        return n_bytes if isinstance(n_bytes, int) else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that it uses."""
        return self.parameter_bytes + self.tied_bytes

    @property
    def reads_samples(self) -> bool:
        """Whether samples affect it, as far as is known. Otherwise several devices may compute all
        of it, each for the readers of its own samples, which the operator is then cut by."""
        return self.attrs.get("reads_samples") is not False

    @property
    def trained_share(self) -> float:
        """Share of the bytes of its weights that are trained; 0 without weights."""
        n_bytes = self.attrs.get("frozen_bytes", 0)
        n_frozen = n_bytes if isinstance(n_bytes, int) else 0
        n_all = self.weight_bytes
        return (n_all - n_frozen) / n_all if n_all else 0.0

    @property
    def n_elements(self) -> int:
        """Elements of the output; 1 when the shape is unknown."""
        return math.prod(self.shape.values())


class Graph(JsonFile, frozen=True, kw_only=True):
    """Operators, each after its producers.

    Attributes:
        batch: samples in the minibatch that shapes, FLOPs and bytes hold for; None when unknown.
    """

    FILE = FileKind("graph file", SCHEMA, SCHEMA_VERSION, GraphError, "capture the model again")

    name: str
    operators: list[Operator]
    batch: Count | None = None
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.operators:
            raise GraphError(f"graph {self.name!r} is empty: it needs at least one operator")
        if self.batch is not None and not 1 <= self.batch <= MOST_COUNT:
            raise GraphError(
                f"graph {self.name!r} has batch {shorten(self.batch)}: it must be >= 1, and at "
                "most 2**53"
            )
        check_references(self.name, self.operators)
        seen: set[str] = set()
        for operator in self.operators:
            late = next((name for name in operator.inputs if name not in seen), None)
            if late is not None:
                sort_operators(self.name, self.operators)  # raises when the reason is a cycle
                raise GraphError(
                    f"graph {self.name!r}: operator {operator.name!r} comes before its producer "
                    f"{late!r}: list operators in topological order"
                )
            seen.add(operator.name)

    @classmethod
    def from_unordered(
        cls, name: str, operators: Iterable[Operator], *, batch: int | None = None
    ) -> Graph:
        """Put the operators in topological order (stable: by first appearance) and validate.

        Raises:
            GraphError: empty, cyclic, or inconsistent.
        """
        listed = list(operators)
        check_references(name, listed)
        return cls(name=name, operators=sort_operators(name, listed), batch=batch)

    def ties(self) -> list[tuple[int, ...]]:
        """Positions of the operators that share weights: the first of each, and those that are tied
        to it."""
        index = self.index()
        users: dict[int, list[int]] = {}
        for i, operator in enumerate(self.operators):
            if isinstance(name := operator.attrs.get("tied_to"), str) and name in index:
                users.setdefault(index[name], [index[name]]).append(i)
        return list(map(tuple, users.values()))

    def index(self) -> dict[str, int]:
        """Position of each operator by name."""
        return {operator.name: i for i, operator in enumerate(self.operators)}

    def producers(self) -> list[list[int]]:
        """Positions of each operator's distinct producers."""
        position = self.index()
        return [
            list(dict.fromkeys(position[name] for name in operator.inputs))
            for operator in self.operators
        ]

    def consumers(self) -> list[list[int]]:
        """Positions of each operator's consumers, ascending."""
        found: list[list[int]] = [[] for _ in self.operators]
        for i, producers in enumerate(self.producers()):
            for producer in producers:
                found[producer].append(i)
        return found

    def made_of_weights(self) -> frozenset[str]:
        """Operators whose output depends on weights. Autocast may round what they send to other
        devices; positions, angles and masks of the data alone must stay as they are."""
        found: set[str] = set()
        for operator in self.operators:
            if operator.weight_bytes or not found.isdisjoint(operator.inputs):
                found.add(operator.name)
        return frozenset(found)

    def mixing_operator(self) -> Operator | None:
        """The first operator that needs all samples of a batch at once; None if there is none."""
        return next((op for op in self.operators if op.attrs.get("mixes_samples")), None)

    def norm_calls(self) -> list[tuple[str, str]]:
        """The first and each further operator of every batch norm that several operators call."""
        shared = ((op.attrs.get("shares_norm_with"), op.name) for op in self.operators)
        return [(first, name) for first, name in shared if isinstance(first, str)]

    def planned_alike(self) -> list[tuple[str, str]]:
        """The first and each further operator of those that have one plan: the calls of a batch
        norm, and the operators that share a buffer which forward writes."""
        first_of = {name: pair[0] for pair in self.norm_calls() for name in pair}
        groups: list[tuple[set[object], list[str]]] = []
        for operator in self.operators:
            written, norm = operator.attrs.get("writes_buffers"), first_of.get(operator.name)
            shared = set[object](written if isinstance(written, list) else ())
            shared |= {("norm", norm)} if norm else set()
            joined = [group for group in groups if not group[0].isdisjoint(shared)]
            names = [name for _, known in joined for name in known]
            shared = shared.union(*(known for known, _ in joined))
            others = [group for group in groups if group not in joined]
            groups = [*others, (shared, [*names, operator.name])] if shared else groups
        return [(names[0], other) for _, names in groups for other in names[1:]]

    @property
    def parameter_bytes(self) -> int:
        return sum(operator.parameter_bytes for operator in self.operators)

    def content_hash(self) -> str:
        """Hash of all fields that planning reads, but for kept and inner bytes, which older graphs
        lack; in 16 hex digits; strategies store it."""
        operators = [
            msgspec.structs.replace(
                op, attrs={k: v for k, v in op.attrs.items() if k not in _NOT_HASHED}
            )
            for op in self.operators
        ]
        hashed = msgspec.structs.replace(self, operators=operators)
        return hashlib.sha256(msgspec.json.encode(hashed, order="sorted")).hexdigest()[:16]


def _check(operator: str, field: str, value: float, is_right: bool, most: str) -> None:
    if not is_right:
        raise GraphError(
            f"operator {operator!r} has {field} {shorten(value)}: it must be >= 0, at most {most}"
        )


def check_references(graph: str, operators: list[Operator]) -> None:
    """Refuse duplicate names and producers that do not exist."""
    known: set[str] = set()
    for operator in operators:
        if operator.name in known:
            raise GraphError(
                f"graph {graph!r} has two operators named {operator.name!r}: rename one"
            )
        known.add(operator.name)
    for operator in operators:
        for name in operator.inputs:
            if name not in known:
                raise GraphError(
                    f"graph {graph!r}: operator {operator.name!r} reads from an unknown "
                    f"operator {name!r}: add it, or drop the input"
                )


def sort_operators(graph: str, operators: list[Operator]) -> list[Operator]:
    """Sort topologically, and keep the listed order where possible.

    Raises:
        GraphError: cyclic; names the operators of one cycle.
    """
    position = {operator.name: i for i, operator in enumerate(operators)}
    sorter = TopologicalSorter(
        {i: [position[name] for name in operator.inputs] for i, operator in enumerate(operators)}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = [operators[i].name for i in error.args[1]]
        raise GraphError(
            f"graph {graph!r} is cyclic: {' -> '.join(cycle)}: remove one of these edges"
        ) from None
    ready, order = list(sorter.get_ready()), list[Operator]()
    heapq.heapify(ready)
    while ready:
        first = heapq.heappop(ready)
        order.append(operators[first])
        sorter.done(first)
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
    return order

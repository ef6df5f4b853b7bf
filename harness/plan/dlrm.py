"""The graph of a DLRM from the sizes on its command line, to plan without the model.

As FlexFlow's example builds it: the bottom MLP's output and one row of each table are concatenated
(no pairwise interaction); a ReLU follows every layer but the last, which has a sigmoid.
"""

from dataclasses import dataclass
from itertools import pairwise

from harness.domain.graph import Attribute, Graph, Operator
from harness.errors import ConfigError, GraphError
from harness.inputs import find_int, shorten

FLOAT_BYTES = 4
_MOST_TABLES = 10_000


@dataclass(frozen=True, kw_only=True)
class DlrmSizes:
    """Sizes of the model.

    Attributes:
        rows: of each table.
        dim: columns of every table.
        bottom, top: widths of the MLPs, input first.
        batch: samples per step.
    """

    n_tables: int = 8
    rows: int = 1_000_000
    dim: int = 64
    bottom: tuple[int, ...] = (64, 512, 512, 64)
    top: tuple[int, ...] = (576, 1024, 1024, 1024, 1)
    batch: int = 1024

    def __post_init__(self) -> None:
        if min(self.n_tables, self.rows, self.dim, self.batch, *self.bottom, *self.top) < 1:
            raise GraphError(f"every size of a DLRM must be >= 1, got {self}")
        if len(self.bottom) < 2 or len(self.top) < 2:
            raise GraphError(
                f"MLPs need an input and an output width, got {self.bottom}, {self.top}"
            )
        width = self.bottom[-1] + self.n_tables * self.dim
        if self.top[0] != width:
            raise GraphError(
                f"the top MLP takes {self.top[0]} features, but the bottom MLP's "
                f"{self.bottom[-1]} and "
                f"{self.n_tables} tables of {self.dim} make {width}: change one"
            )


def _whole_numbers(text: str, separator: str, flag: str, example: str) -> tuple[int, ...]:
    parts = text.split(separator)
    numbers = tuple(number for part in parts if (number := find_int(part)) is not None)
    if len(numbers) != len(parts):
        raise ConfigError(f"{flag} {shorten(text)} is not of the form {example}")
    return numbers


def parse_dlrm(tables: str, bottom: str, top: str, batch: int) -> DlrmSizes:
    """Read sizes as DLRM's own command line writes them, the tables as NUMBERxROWSxCOLUMNS.

    Raises:
        ConfigError: not of that form.
        GraphError: sizes that do not fit one another.
    """
    form = "8x1000000x64"
    sizes = _whole_numbers(tables.lower(), "x", "--dlrm-tables", form)
    if len(sizes) != 3:
        raise ConfigError(
            f"--dlrm-tables {shorten(tables)} is not NUMBERxROWSxCOLUMNS, such as {form}"
        )
    n_tables, rows, dim = sizes
    if n_tables > _MOST_TABLES:
        raise ConfigError(f"--dlrm-tables {tables!r} names more than {_MOST_TABLES} tables")
    return DlrmSizes(
        n_tables=n_tables,
        rows=rows,
        dim=dim,
        bottom=_whole_numbers(bottom, "-", "--dlrm-bottom-mlp", "64-512-512-64"),
        top=_whole_numbers(top, "-", "--dlrm-top-mlp", "576-1024-1024-1024-1"),
        batch=batch,
    )


def dlrm_graph(flags: DlrmSizes) -> Graph:
    """The operators, with FLOPs and bytes of the whole batch."""
    made = _Operators(flags.batch)
    made.add("dense", "input", [], flags.bottom[0])
    dense = made.add_mlp("bottom", "dense", flags.bottom, last="relu")
    tables = []
    for k in range(flags.n_tables):
        made.add(f"indices{k}", "input", [], 1)
        tables.append(f"table{k}")
        made.add(
            f"table{k}",
            "embedding",
            [f"indices{k}"],
            flags.dim,
            parameters=flags.rows * flags.dim,
            signature=f"embedding {flags.rows}x{flags.dim}",
            attrs={"n_rows": flags.rows},
        )
    made.add("concat", "cat", [dense, *tables], flags.top[0])
    logit = made.add_mlp("top", "concat", flags.top, last="sigmoid")
    made.add("loss", "loss", [logit], 1)
    return Graph(name="dlrm", operators=made.found, batch=flags.batch)


class _Operators:
    """Operators in order, of equal numbers of samples."""

    def __init__(self, batch: int) -> None:
        self.batch, self.found = batch, list[Operator]()

    def add(
        self,
        name: str,
        kind: str,
        inputs: list[str],
        features: int,
        *,
        parameters: int = 0,
        flops: float | None = None,
        signature: str = "",
        attrs: dict[str, Attribute] | None = None,
    ) -> None:
        """Add one; without FLOPs it has as many as elements, each way, and inputs have none."""
        elements = self.batch * features
        forward, backward = (elements, elements) if flops is None else (flops, 2 * flops)
        computes = kind != "input"
        self.found.append(
            Operator(
                name=name,
                kind=kind,
                inputs=inputs,
                shape={"sample": self.batch, "feature": features},
                forward_flops=float(forward * computes),
                backward_flops=float(backward * computes),
                parameter_bytes=FLOAT_BYTES * parameters,
                activation_bytes=FLOAT_BYTES * elements,
                signature=signature,
                attrs=attrs or {},
            )
        )

    def add_mlp(self, name: str, source: str, widths: tuple[int, ...], *, last: str) -> str:
        """Add linear layers, each followed by its activation; returns the last one's name."""
        for k, (i, o) in enumerate(pairwise(widths)):
            linear, function = f"{name}{k}", last if k == len(widths) - 2 else "relu"
            self.add(
                linear,
                "linear",
                [source],
                o,
                parameters=(i + 1) * o,
                flops=2.0 * self.batch * i * o,
                attrs={"in_features": i, "out_features": o},
            )
            source = f"{linear}.{function}"
            self.add(source, "elementwise", [linear], o, attrs={"function": function})
        return source

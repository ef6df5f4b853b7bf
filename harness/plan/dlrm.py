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
    operators = [_tensor("dense", "input", [], flags.bottom[0], flags.batch)]
    operators += _mlp("bottom", "dense", flags.bottom, flags.batch, last="relu")
    tables = []
    for k in range(flags.n_tables):
        operators.append(_tensor(f"indices{k}", "input", [], 1, flags.batch))
        tables.append(f"table{k}")
        operators.append(
            _tensor(
                f"table{k}",
                "embedding",
                [f"indices{k}"],
                flags.dim,
                flags.batch,
                parameters=flags.rows * flags.dim,
                signature=f"embedding {flags.rows}x{flags.dim}",
                attrs={"n_rows": flags.rows},
            )
        )
    operators.append(
        _tensor(
            "concat",
            "cat",
            [_last_name(operators, "bottom"), *tables],
            flags.top[0],
            flags.batch,
        )
    )
    operators += _mlp("top", "concat", flags.top, flags.batch, last="sigmoid")
    operators.append(_tensor("loss", "loss", [operators[-1].name], 1, flags.batch))
    return Graph(name="dlrm", operators=operators, batch=flags.batch)


def _last_name(operators: list[Operator], prefix: str) -> str:
    """Name of the last operator whose name begins so."""
    return next(op.name for op in reversed(operators) if op.name.startswith(prefix))


def _tensor(
    name: str,
    kind: str,
    inputs: list[str],
    features: int,
    batch: int,
    *,
    parameters: int = 0,
    flops: float | None = None,
    signature: str = "",
    attrs: dict[str, Attribute] | None = None,
) -> Operator:
    elements = batch * features
    forward = float(elements) if flops is None else flops
    return Operator(
        name=name,
        kind=kind,
        inputs=inputs,
        shape={"sample": batch, "feature": features},
        forward_flops=0.0 if kind == "input" else forward,
        backward_flops=0.0 if kind == "input" else (forward if flops is None else 2 * flops),
        parameter_bytes=FLOAT_BYTES * parameters,
        activation_bytes=FLOAT_BYTES * elements,
        signature=signature,
        attrs=attrs or {},
    )


def _mlp(
    name: str, source: str, widths: tuple[int, ...], batch: int, *, last: str
) -> list[Operator]:
    """Linear layers, each followed by its activation."""
    operators: list[Operator] = []
    for k, (i, o) in enumerate(pairwise(widths)):
        before = operators[-1].name if operators else source
        function = last if k == len(widths) - 2 else "relu"
        operators.append(
            _tensor(
                f"{name}{k}",
                "linear",
                [before],
                o,
                batch,
                parameters=(i + 1) * o,
                flops=2.0 * batch * i * o,
                attrs={"in_features": i, "out_features": o},
            )
        )
        operators.append(
            _tensor(
                f"{name}{k}.{function}",
                "elementwise",
                [f"{name}{k}"],
                o,
                batch,
                attrs={"function": function},
            )
        )
    return operators

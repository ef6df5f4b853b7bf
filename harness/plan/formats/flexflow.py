"""FlexFlow's strategies: one entry per operator, as console lines and as a text file.

    console   [Dense_100] num_dims(2) dims[1,4] device_ids[0,1,2,3]
    text      the number of operators, then for each: name, device_type, nDims, dims, n ids, ids;
              one item a line, lists separated by tabs

The order of dims is not written in any of these files. FlexFlow's own (console, text, protobuf)
are innermost first, samples last: [1,4] of a linear layer is data parallel. Its simulator of 2018
prints samples first: there [1,4] is split by feature. An `Entry` keeps the order of its file;
the caller of `Entry.cuts` says which order to take. Entries and operators of a graph are matched by
name, else by kind and order.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, n_parts
from harness.domain.sharding import cuttable_dims, full_units, has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import StrategyError
from harness.inputs import find_ints, parse_int, shorten
from harness.plan.builders import cut_or_whole
from harness.plan.report import describe_plans

DimOrder = Literal["innermost_first", "samples_first"]

# The dims of a list of this length, samples first. FlexFlow's tensors are (n, c, h, w).
_NAMED_DIMS: dict[int, tuple[str, ...]] = {
    1: ("sample",),
    2: ("sample", "feature"),
    3: ("sample", "seq", "feature"),
    4: ("sample", "feature", "height", "width"),
}
_MOST_DEVICES = 2**31  # FlexFlow counts them by int32
MOST_DIMS = 8  # a tensor of FlexFlow has 5 at most
_MARK = "\ufeff"  # a byte-order mark, where an editor has put one
_CONSOLE = re.compile(r"\[([^\]]+)\] num_dims\(([^)]*)\) dims\[([^\]]*)\] device_ids\[([^\]]*)\]")


class Entry(msgspec.Struct, frozen=True):
    """One operator's line.

    Attributes:
        dims: number of parts along each dim, in the order of the file.
        devices: device of each part.
        device_type: 0 GPU, 1 CPU; None where the format has no such field.
        memory_types: of the regions (0 framebuffer, 1 zero-copy); None where it has no such field.
    """

    name: str
    dims: tuple[int, ...]
    devices: tuple[int, ...]
    device_type: int | None = None
    memory_types: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.dims) <= MOST_DIMS or not _are_sizes(self.dims, 1):
            raise StrategyError(
                f"operator {self.name!r} has dims {shorten(list(self.dims))}: each must be >= 1, "
                f"and 1 to {MOST_DIMS} be there"
            )
        if not _are_sizes(self.devices, 0):
            raise StrategyError(
                f"operator {self.name!r} has devices {shorten(list(self.devices))}: each must be "
                f">= 0 and < {_MOST_DEVICES}"
            )
        if math.prod(self.dims) != len(self.devices):
            raise StrategyError(
                f"operator {self.name!r} has {math.prod(self.dims)} parts (dims {list(self.dims)}) "
                f"and {len(self.devices)} devices: name one device per part"
            )

    def cuts(
        self, order: DimOrder = "innermost_first", own_dims: Sequence[str] = ()
    ) -> dict[str, int]:
        """Parts along each named dim, samples first.

        Args:
            own_dims: of the operator's output; they name what is cut where there are as many.

        Raises:
            StrategyError: more dims than tensors of FlexFlow have.
        """
        if len(self.dims) not in _NAMED_DIMS:
            raise StrategyError(
                f"operator {self.name!r} has {len(self.dims)} dims, known are 1 to "
                f"{len(_NAMED_DIMS)}"
            )
        if len(own_dims) == len(self.dims):
            return dict(zip(own_dims, self._sizes(order), strict=True))
        return self.shown_cuts(order)

    def shown_cuts(self, order: DimOrder = "innermost_first") -> dict[str, int]:
        """As `cuts`, for people: of more dims than have names, those after samples by number."""
        n = len(self.dims)
        names = _NAMED_DIMS.get(n, ("sample", *(f"dim{k}" for k in range(1, n))))
        return dict(zip(names, self._sizes(order), strict=True))

    def _sizes(self, order: DimOrder) -> tuple[int, ...]:
        return self.dims if order == "samples_first" else self.dims[::-1]


def _are_sizes(values: Sequence[int], at_least: int) -> bool:
    return all(at_least <= value < _MOST_DEVICES for value in values)


def _numbers(text: str, what: str) -> tuple[int, ...]:
    return tuple(
        parse_int(item, what, at_most=_MOST_DEVICES - 1, error=StrategyError)
        for item in (text.split(",") if text else ())
    )


def check_names(entries: Sequence[Entry], source: str) -> None:
    """Refuse two entries of one name."""
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise StrategyError(f"{source} has operator {shorten(entry.name)} twice: keep one")
        seen.add(entry.name)


def parse_console(text: str, *, source: str = "FlexFlow console output") -> list[Entry]:
    """Read console lines; lines that are not of this form are other output and are skipped.

    Raises:
        StrategyError: no such line at all, or one whose numbers contradict each other.
    """
    entries = []
    for number, line in enumerate(text.removeprefix(_MARK).splitlines(), start=1):
        match = _CONSOLE.fullmatch(line.strip())
        if match is None:
            continue
        where, (name, n_dims, sizes, ids) = f"{source}:{number}", match.groups()
        dims = _numbers(sizes, f"{where}: one of dims")
        if len(dims) != parse_int(n_dims, f"{where}: num_dims", error=StrategyError):
            raise StrategyError(f"{where}: num_dims is {n_dims} and {len(dims)} dims follow")
        entries.append(Entry(name, dims, _numbers(ids, f"{where}: one of device_ids")))
    if not entries:
        raise StrategyError(
            f"{source} has no line like `[Dense_100] num_dims(2) dims[1,4] device_ids[0,1,2,3]`"
        )
    check_names(entries, source)
    return entries


def print_console(entries: Sequence[Entry]) -> str:
    """Write console lines; device and memory types have no place in them."""
    return "".join(
        f"[{e.name}] num_dims({len(e.dims)}) dims[{','.join(map(str, e.dims))}] "
        f"device_ids[{','.join(map(str, e.devices))}]\n"
        for e in entries
    )


def parse_text(text: str, *, source: str = "FlexFlow strategy file") -> list[Entry]:
    """Read the text file.

    Raises:
        StrategyError: cut short, too long, or a count that disagrees; names the operator.
    """
    lines = iter(text.removeprefix(_MARK).splitlines())

    def take(what: str) -> str:
        line = next(lines, None)
        if line is None:
            raise StrategyError(f"{source} ends before {what}: the file is cut short")
        return line.strip()

    def take_int(what: str) -> int:
        return parse_int(take(what), f"{source}: {what}", error=StrategyError)

    def take_list(what: str, n_items: int) -> tuple[int, ...]:
        items = take(what).split()
        numbers = find_ints(items)
        if numbers is None or len(items) != n_items:
            raise StrategyError(
                f"{source}: {what} are {shorten(items)}, expected {n_items} whole numbers"
            )
        return numbers

    entries = []
    for k in range(take_int("the number of operators")):
        name = take(f"operator {k + 1}")
        device_type = take_int(f"device type of {shorten(name)}")
        dims = take_list(f"dims of {shorten(name)}", take_int(f"nDims of {shorten(name)}"))
        n_devices = take_int(f"device count of {shorten(name)}")
        devices = take_list(f"devices of {shorten(name)}", n_devices)
        entries.append(Entry(name, dims, devices, device_type))
    left = [line for line in lines if line.strip()]
    if left:
        raise StrategyError(
            f"{source} goes on with {shorten(left[0])} after its {len(entries)} operators"
        )
    check_names(entries, source)
    return entries


def print_text(entries: Sequence[Entry]) -> str:
    """Write the text file; an entry without a device type is on a GPU."""
    lines = [str(len(entries))]
    for e in entries:
        lines += [e.name, str(e.device_type or 0)]
        lines += [str(len(e.dims)), "\t".join(map(str, e.dims))]
        lines += [str(len(e.devices)), "\t".join(map(str, e.devices))]
    return "\n".join(lines) + "\n"


# FlexFlow's words for kinds of operators, as its default names begin.
_KINDS = {
    "dense": "linear",
    "linear": "linear",
    "conv": "conv2d",
    "conv2d": "conv2d",
    "pool": "pool",
    "pool2d": "pool",
    "flat": "flatten",
    "embed": "embedding",
    "embedding": "embedding",
    "concat": "cat",
    "elementunary": "elementwise",
    "multiheadattention": "attention",
    "softmax": "softmax",
    "batchnorm": "batch_norm",
    "mse_loss": "loss",
    "lstm": "lstm",
    "add": "add",
}


def kind_from_name(name: str) -> str:
    """The operator's kind by FlexFlow's naming: `Dense_100`, `Dense_512_100` and `linear1` are
    linear."""
    return _KINDS.get(name.lower().rstrip("0123456789-_"), "other")


def describe_entries(entries: Sequence[Entry], order: DimOrder = "innermost_first") -> str:
    """Name a strategy by its content, such as `data-parallel MLPs, tables on one device each`."""
    return describe_plans(
        (kind_from_name(e.name), dict(e.shown_cuts(order)), list(e.devices)) for e in entries
    )


def strategy_from_entries(
    entries: Sequence[Entry], graph: Graph, *, batch: int, order: DimOrder = "innermost_first"
) -> Strategy:
    """Lay entries over a graph.

    Names are matched; if none is known, operators of equal kind are matched in order. Operators
    that FlexFlow fuses into others (activations, losses, ...) follow their first producer.

    Raises:
        StrategyError: an entry without an operator, or an operator that nothing places.
    """
    entry_of = _match(entries, graph)
    plans: dict[str, OperatorPlan] = {}
    for operator in graph.operators:
        if not has_tasks(operator):
            continue
        entry = entry_of.get(operator.name)
        if entry is not None:
            cuts = {dim: n for dim, n in entry.cuts(order, [*operator.shape]).items() if n > 1}
            plans[operator.name] = OperatorPlan(dict(cuts), list(entry.devices))
        else:
            plans[operator.name] = _follow(operator, plans, graph, batch)
    return Strategy(name=describe_entries(entries, order), batch=batch, operators=plans)


def _match(entries: Sequence[Entry], graph: Graph) -> dict[str, Entry]:
    known = {op.name: op for op in graph.operators if has_tasks(op)}
    by_name = {entry.name: entry for entry in entries if entry.name in known}
    if len(by_name) == len(entries):
        return by_name
    if by_name:
        foreign = next(entry.name for entry in entries if entry.name not in known)
        raise StrategyError(
            f"graph {graph.name!r} has no operator {foreign!r}, though it has "
            f"{len(by_name)} of the strategy's {len(entries)}: the strategy is for another model"
        )
    matched: dict[str, Entry] = {}
    for kind in dict.fromkeys(kind_from_name(entry.name) for entry in entries):
        own = [entry for entry in entries if kind_from_name(entry.name) == kind]
        found = [op.name for op in known.values() if op.kind == kind]
        if len(own) != len(found):
            raise StrategyError(
                f"the strategy has {len(own)} operators of kind {kind}, graph {graph.name!r} has "
                f"{len(found)}: it is for another model"
            )
        matched.update(zip(found, own, strict=True))
    return matched


def _follow(
    operator: Operator, plans: dict[str, OperatorPlan], graph: Graph, batch: int
) -> OperatorPlan:
    """The plan of the first placed producer where the operator can be cut that way; else by samples
    over its devices; else whole."""
    source = next((plans[name] for name in operator.inputs if name in plans), None)
    if source is None:
        raise StrategyError(
            f"the strategy does not place operator {operator.name!r} of {graph.name!r}"
        )
    shape = full_units(operator, batch=batch, graph_batch=graph.batch)
    allowed = cuttable_dims(operator, shape)
    if all(dim in allowed and shape[dim] >= n_parts(cut) for dim, cut in source.partition.items()):
        return source
    devices = sorted(set(source.devices))
    return cut_or_whole(operator, graph, batch, SAMPLE, len(devices), devices)


def entries_from_strategy(strategy: Strategy, graph: Graph) -> list[Entry]:
    """Write a strategy as FlexFlow's entries, innermost dim first.

    Raises:
        StrategyError: unequal shares, dims that FlexFlow does not know, several microbatches or
            stages: which the format cannot hold.
    """
    if strategy.n_microbatches > 1 or len(strategy.stages) > 1:
        raise StrategyError(
            f"strategy {strategy.name!r} has {strategy.n_microbatches} microbatches and "
            f"{len(strategy.stages)} stages: FlexFlow's files hold neither"
        )
    entries = []
    for operator in graph.operators:
        plan = strategy.operators.get(operator.name)
        if plan is None:
            continue
        unequal = [cut for cut in plan.partition.values() if isinstance(cut, list)]
        if unequal:
            raise StrategyError(
                f"operator {operator.name!r} is cut into shares {unequal[0]}: FlexFlow's files "
                "hold equal parts only"
            )
        dims = list(operator.shape) or [SAMPLE]
        extra = [d for d, cut in plan.partition.items() if d not in dims and n_parts(cut) > 1]
        if extra or len(dims) > 4:
            raise StrategyError(
                f"operator {operator.name!r} is cut along {extra or dims}: FlexFlow's files "
                "cannot say so"
            )
        if plan.keys != "input":
            raise StrategyError(
                f"operator {operator.name!r} has keys {plan.keys!r}: FlexFlow's files cannot say "
                "so: use keys 'input'"
            )
        sizes = tuple(n_parts(plan.partition.get(dim, 1)) for dim in reversed(dims))
        entries.append(Entry(operator.name, sizes, tuple(plan.devices), 0))
    return entries

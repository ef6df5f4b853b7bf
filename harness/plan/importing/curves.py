"""Curves of collectives that others measured: nccl-tests' output, or CSV."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from harness.domain.cluster import Cluster, CollectivePoint
from harness.errors import ConfigError, DataError
from harness.inputs import MOST_COUNT, decode_text, find_int, find_number, read_file, shorten
from harness.plan.importing.tables import UNITS_S, Row, read_table
from harness.units import format_count, parse_bytes

_RANK = re.compile(
    r"^#\s+Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)",
    re.MULTILINE,
)
_PREFIXED = re.compile(r"^([^#\n]{1,100})#\s{1,100}size\s{1,100}count\s", re.MULTILINE)
_TEST = re.compile(r"\b([a-z_]+)_perf\b")
# By the names of nccl-tests' programs, and of files.
_OPERATIONS = {
    **{name: name for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")},
    **dict.fromkeys(("alltoall", "all_to_all"), "all_to_all"),
}
_OTHERS = ("sendrecv", "hypercube", "gather", "scatter", "reduce")
_INITIALS = {"ar": "all_reduce", "ag": "all_gather", "rs": "reduce_scatter"}
# Of outputs that do not count wrong values at each size.
_FAILED = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)\s+FAILED", re.MULTILINE)
_REPAIR = "repair the links first, because times of wrong results mean nothing"
_MOST_RANKS = 2**20
# Columns of nccl-tests that some programs leave blank: operation and root.
_N_BLANK = 2


def read_collectives(path: Path, n_ranks: int | None = None) -> list[CollectivePoint]:
    """The curve in a file, nccl-tests' or CSV.

    Args:
        n_ranks: that took part, where neither the file nor its name (`AR_GPU8_...`) says so.

    Raises:
        DataError: it holds no curve, or nothing says how many ranks took part or in what.
    """
    text = _text_of(path)
    heads = [words for line in text.splitlines() if line[:1] == "#" and (words := _heads(line))]
    if len(heads) > 1:
        raise DataError(
            f"{path} has {len(heads)} tables: write one test to a file, and build nccl-tests with "
            "MPI=1, because without it each rank tests for itself"
        )
    return _nccl_tests(text, heads[0], path, n_ranks) if heads else read_curve(path, n_ranks)


def _text_of(path: Path) -> str:
    text = decode_text(read_file(path, "curve", DataError, is_given=True), str(path), DataError)
    prefixed = _PREFIXED.search(text)  # by the mark of mpirun, kubectl or a terminal
    if prefixed is not None:
        text = "\n".join(line.removeprefix(prefixed[1]) for line in text.splitlines())
    return text


def check_hosts(path: Path, cluster: Cluster) -> None:
    """Refuse a curve of one host that counts as between nodes, and one of several as inside one.

    A single node may be of several hosts, such as a rack whose devices share one switch.
    """
    n_each = max(len(node.devices) for node in cluster.nodes)
    n, hosts = _group_of(_text_of(path), path)
    if hosts and len(cluster.nodes) > 1 and (n > n_each) != (len(hosts) > 1):
        counts = "between nodes" if n > n_each else "inside a node"
        raise DataError(
            f"{path} is of {n} ranks on {format_count(len(hosts), 'host')}, and would count as "
            f"{counts}, because a node has {n_each} devices: leave it out and give --bandwidth "
            "INSIDE,BETWEEN"
        )


def _group_of(text: str, path: Path) -> tuple[int, set[str]]:
    """Number of ranks and names of the hosts of one collective; several groups run one at once."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for found in _RANK.finditer(text):
        groups[found["group"]][found["rank"]] = found["host"]
    sizes = sorted({len(group) for group in groups.values()})
    if len(sizes) > 1:
        listed = " and ".join(map(str, sizes))
        raise DataError(f"{path} is of groups of {listed} ranks: split the ranks evenly")
    first = next(iter(groups.values()), {})
    return len(first), set(first.values())


def _heads(line: str) -> list[str]:
    """Names of the columns, if a line of nccl-tests has them."""
    words = line.removeprefix("#").split() if line.startswith("#") else []
    return words if words[:1] == ["size"] and "time" in words else []


def _nccl_tests(
    text: str, heads: Sequence[str], path: Path, n_ranks: int | None
) -> list[CollectivePoint]:
    n_named = _group_of(text, path)[0]
    n = n_named if n_named > 1 else n_ranks
    if n is None:
        raise DataError(f"{path} names {n_named} ranks: give --ranks N, how many took part")
    unit = re.search(r"^#\s+\((\w+)\)\s+\(elements\)\s+\((\w+)\)", text, re.MULTILINE)
    if unit is not None and (unit[1] != "B" or unit[2] not in UNITS_S):
        raise DataError(f"{path} has sizes in {unit[1]} and times in {unit[2]}: print B and us")
    unit_s = UNITS_S[unit[2]] if unit is not None else UNITS_S["us"]
    found: list[tuple[int, float]] = []
    of_wrong = [k - heads.index("time") for k, head in enumerate(heads) if head == "#wrong"]
    for line in text.splitlines():
        cells = line.split()
        at = None if line.startswith("#") else _place_of_time(heads, len(cells))
        size, time = (None, None) if at is None else (find_int(cells[0], 1), find_number(cells[at]))
        if at is not None and size and time:
            found.append((size, time * unit_s))
            wrong = [cell for k in of_wrong for cell in cells[at + k : at + k + 1]]
            if n_wrong := max((find_number(cell) or 0 for cell in wrong), default=0):
                raise DataError(f"{path} has {n_wrong:.0f} wrong values at {size} bytes: {_REPAIR}")
    if failed := _FAILED.search(text):
        raise DataError(f"{path} has {failed[1]} values out of bounds: {_REPAIR}")
    return _points(found, _operation_of(text, heads, path), n, str(path))


def _place_of_time(heads: Sequence[str], n_cells: int) -> int | None:
    """The cell of a line's first time: out of place, or in place where that alone is printed."""
    first, n_missing = heads.index("time"), len(heads) - n_cells
    has_both = heads.count("time") > 1
    n_each = heads.index("time", first + 1) - first if has_both else 0
    if n_missing <= 0 or n_missing == n_each:
        return first
    return first - n_missing if n_missing <= _N_BLANK else None


def _operation_of(text: str, heads: Sequence[str], path: Path) -> str:
    """The collective of the program that an output names, else of the file's name; a sum without
    a name is all-reduce."""
    named = set(_TEST.findall(text))
    if len(named) > 1:
        raise DataError(f"{path} holds {' and '.join(sorted(named))}: write one test to a file")
    for name in named:
        if name not in _OPERATIONS:
            raise DataError(f"{path} is of {name}: give one of {', '.join(_OPERATIONS)}")
        return _OPERATIONS[name]
    found = _named_operation(path)
    if found is None and ("redop" not in heads or re.search(r"\s(none|copy)\s", text)):
        raise DataError(
            f"{path} does not say which collective it is of: put its name into the file's, such as "
            "all_gather.txt"
        )
    return found or "all_reduce"


def _named_operation(path: Path) -> str | None:
    """The collective in a file's name, if any; raises DataError if it is not read here."""
    name = re.sub(r"[\s-]", "_", path.stem.lower())
    plain = name.replace("_", "")
    found = next((op for word, op in _OPERATIONS.items() if word.replace("_", "") in plain), None)
    found = found or _INITIALS.get(name.split("_")[0])
    other = next((word for word in _OTHERS if found is None and word in plain), None)
    if other is not None:
        raise DataError(f"{path} is of {other} by its name: give one of {', '.join(_OPERATIONS)}")
    return found


def read_curve(path: Path, n_ranks: int | None = None) -> list[CollectivePoint]:
    """A curve of a CSV file: columns `size` and `time` with their units in brackets. It is of
    all-reduce, if the file's name has no other collective.

    Raises:
        DataError: as `read_collectives`.
    """
    rows = read_table(path, [])
    size, unit_bytes = _unit_column(rows[0], _SIZE, _unit_bytes, path, "size(B)")
    time, unit_s = _unit_column(rows[0], _DURATION, UNITS_S.get, path, "time(us)")
    n = _ranks_of_name(path.name.lower()) or n_ranks
    if n is None:
        raise DataError(f"{path} does not say how many ranks took part: give --ranks N")
    found: list[tuple[int, float]] = []
    for row in rows:
        n_bytes = round(row.number(size) * unit_bytes)
        seconds = row.number(time) * unit_s
        if n_bytes > MOST_COUNT:
            raise DataError(f"{row.where}: {size} is {row.text(size)}: no buffer is so large")
        if n_bytes > 0 and seconds > 0:
            found.append((n_bytes, seconds))
    return _points(found, _named_operation(path) or "all_reduce", n, str(path))


def _ranks_of_name(name: str) -> int | None:
    """None also if a name has several numbers, or a number of nodes, which may be a factor."""
    forms = (r"gpus?[_-]?(\d+)", r"(\d+)[_-]?(?:gpus?|ranks?)")
    found = {number for form in forms for number in re.findall(form, name)}
    if len(found) != 1 or re.search(r"nodes?[_-]?\d|\d[_-]?nodes?|\d+x\d+", name):
        return None
    return find_int(found.pop(), 2, _MOST_RANKS)


_SIZE = re.compile(r"size\s*+[(\[_]?\s*+(\w*+)[)\]]?")
_DURATION = re.compile(r"(?:time|latency)\s*[(\[_]\s*(\w+)[)\]]?")


def _unit_bytes(unit: str) -> int | None:
    with contextlib.suppress(ConfigError):
        return parse_bytes(f"1{unit.removesuffix('ytes')}")
    return None


def _unit_column(
    row: Row, form: re.Pattern[str], unit: Callable[[str], float | None], path: Path, example: str
) -> tuple[str, float]:
    """The first column of a form whose unit is known, and the bytes or seconds of the unit."""
    for name in row.columns:
        found = form.fullmatch(name.lower())
        if found is not None and (scale := unit(found[1])) is not None:
            return name, scale
    raise DataError(
        f"{path} has columns {shorten(', '.join(row.columns))}: it needs {example}, or another "
        f"unit of {example.partition('(')[0]}"
    )


def _points(
    found: Sequence[tuple[int, float]], operation: str, n_ranks: int, source: str
) -> list[CollectivePoint]:
    """The curve through these bytes and seconds."""
    if not found:
        raise DataError(f"{source} has no line with a size and a time: it is no curve")
    own = partial(CollectivePoint, operation=operation, transport="nccl", n_ranks=n_ranks)
    return with_medians(own(n_bytes=n_bytes, duration_s=seconds) for n_bytes, seconds in found)


def with_medians(points: Iterable[CollectivePoint]) -> list[CollectivePoint]:
    """Curves with one point of each size: the median of its points."""
    seconds: dict[CollectivePoint, list[float]] = defaultdict(list)
    for point in points:
        seconds[replace(point, duration_s=1.0)].append(point.duration_s)
    found = [replace(point, duration_s=median(own)) for point, own in seconds.items()]
    return sorted(found, key=lambda point: (point.operation, point.n_ranks, point.n_bytes))


def thinned(points: Sequence[CollectivePoint]) -> list[CollectivePoint]:
    """Points of one curve whose sizes grow by a tenth; the last one stays."""
    found: list[CollectivePoint] = []
    for point in points:
        if not found or point.n_bytes >= 1.1 * found[-1].n_bytes:
            found.append(point)
    return [*found[:-1], points[-1]] if found else []


def bandwidth_of(points: Sequence[CollectivePoint]) -> float:
    """Bytes/s of one device's link, from the largest all-reduce: 2 (n - 1) / n of its bytes cross
    each link of a ring."""
    last = max(points, key=lambda point: point.n_bytes)
    return 2 * (last.n_ranks - 1) / last.n_ranks * last.n_bytes / last.duration_s

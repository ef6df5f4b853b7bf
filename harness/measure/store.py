"""Results on disk: `<results>/<run_id>/run.json` and `rank<k>.jsonl`.

A crash at any moment loses at most the line being written: records are appended line by line,
the header is replaced whole. A full disk costs no more: while a run is running, its directory holds
a reserve of blocks, which the final header is written into. Reading skips, counts and names what it
cannot use: a derivation gets records whose numbers and labels are within bounds, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from harness.domain.files import decode
from harness.domain.labels import MAX_RANK, record_problem
from harness.domain.record import Record
from harness.domain.run import SCHEMA, SCHEMA_VERSION, RunHeader
from harness.errors import ClusterError, HarnessError, ResultsError
from harness.inputs import MOST_FILE_BYTES, find_int, parse_json
from harness.measure.heartbeat import find_dead_writer
from harness.measure.run_files import HEADER_FILE, RESERVE_FILE

# What a results directory may hold beside runs.
_BESIDE_RUNS = ("README.md", "cluster.json", "profile-*.json")

# Lines of a file that are named when they cannot be used; the rest is counted.
MAX_NAMED = 3
# A record has a few hundred bytes.
_MAX_LINE_BYTES = 1 << 16
_LINES_AT_ONCE = 4096
# Of a run whose header names no rank: labels may still name these.
_MAX_RANKS = 1024
_MAX_DEPTH = 16

_DECODER = msgspec.json.Decoder(Record)

# What the final header may add to the first one: a reason with tracebacks, a summary.
_RESERVE_BYTES = 128 * 1024
# A run begins only with this much free: a full disk ends a sweep, instead of each of its runs.
_FREE_BYTES = 2**20


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name file and host where writing fails.

    Raises:
        ResultsError: the operating system refused, for lack of space or of permission.
    """
    full = os.strerror(errno.ENOSPC)
    try:
        yield
    except Exception as error:
        # Libraries that write files have errors of their own, with the system's words in them.
        is_named = isinstance(error, HarnessError)
        if is_named or (not isinstance(error, OSError) and full not in str(error)):
            raise
        reason = getattr(error, "strerror", None) or (full if full in str(error) else str(error))
        raise ResultsError(
            f"{path} on {os.uname().nodename} cannot be written: {reason}; make room there, or "
            "write to another directory"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then replaces `path` whole; if writing fails, it is removed.

    Raises:
        ResultsError: it cannot be written; names file and host.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file whole: readers see the old bytes or the new ones, never a part.

    Raises:
        ResultsError: it cannot be written; names file and host.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def try_directory(directory: Path) -> None:
    """Make a directory, and for a moment a file in it.

    Raises:
        OSError: it cannot be made, or not be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def check_place(flag: str, path: Path) -> None:
    """Refuse a place where no file can be, before what it is to hold is measured.

    Raises:
        ResultsError: names the flag.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try_directory(path.parent)
    except OSError as error:
        raise ResultsError(
            f"{flag} {path} cannot be written ({error.strerror}): give a file that you may write"
        ) from None


def write_header(run_dir: Path, header: RunHeader) -> None:
    """Write or replace `run.json`; rank 0 only. The header of a run that has ended needs no space
    beyond what that of the running one reserved.

    Raises:
        ResultsError: it cannot be written; names file and host.
    """
    data = msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n"
    path, reserve = run_dir / HEADER_FILE, run_dir / RESERVE_FILE
    if header.status == "running":
        try:
            write_atomically(path, data)
            with _writing(reserve), reserve.open("wb") as file:
                n_bytes = len(data) + _RESERVE_BYTES
                os.posix_fallocate(file.fileno(), 0, max(n_bytes, _FREE_BYTES))
                file.truncate(n_bytes)
        except ResultsError:
            _remove(run_dir, path, reserve)
            raise
        return
    if not _fits(data, reserve):
        reserve.unlink(missing_ok=True)
        write_atomically(path, data)
        return
    with _writing(path):
        with reserve.open("r+b") as file:
            file.write(data)
            file.truncate()
            os.fsync(file.fileno())
        reserve.replace(path)


def _remove(run_dir: Path, *files: Path) -> None:
    """Remove what was written of a run that cannot begin."""
    with contextlib.suppress(OSError):
        for file in files:
            file.unlink(missing_ok=True)
        run_dir.rmdir()


def _fits(data: bytes, reserve: Path) -> bool:
    return reserve.exists() and len(data) <= reserve.stat().st_size


class RecordWriter:
    """Appends one rank's records; makes the run's directory, as each node may have its own disk."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Open the rank's file.

        Raises:
            ResultsError: it cannot be written; names file and host. So do the other methods.
        """
        self._path = run_dir / f"rank{rank}.jsonl"
        with _writing(self._path):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)

    def write(self, records: Iterable[Record]) -> None:
        """Append a line each and hand them to the operating system in one write."""
        encode = msgspec.json.encode
        data = b"".join(encode(record) + b"\n" for record in records)
        with _writing(self._path):
            self._append(data)

    def _append(self, data: bytes) -> None:
        """Append all, or the whole lines that there is space for."""
        begin = os.fstat(self._file.fileno()).st_size
        n_written = 0
        try:
            while n_written < len(data):
                n_written += self._file.write(data[n_written:])
        except OSError:
            self._file.truncate(begin + data.rfind(b"\n", 0, n_written) + 1)
            raise

    def close(self) -> None:
        with _writing(self._path):
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as read back: its header and the records of each rank."""

    path: Path
    header: RunHeader
    ranks: dict[int, list[Record]]


@dataclass
class Results:
    """Every run of a directory, and what was skipped, as (path, reason)."""

    runs: list[Run] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def read_header(run_dir: Path) -> RunHeader:
    """Read `run.json`; a run that its writer left open when it died reads as a crash.

    Raises:
        ResultsError: missing, malformed or of another schema or version; names the file.
    """
    path = run_dir / HEADER_FILE
    try:
        header = _decode_header(_read_regular(path), str(path))
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except ClusterError as error:
        raise ResultsError(f"{path}: {error}") from None
    if header.status == "running" and (reason := find_dead_writer(run_dir)):
        return msgspec.structs.replace(header, status="crash", reason=reason)
    return header


def _decode_header(data: bytes, source: str) -> RunHeader:
    tag = parse_json(data, source, ResultsError)
    found = (tag.get("schema"), tag.get("version")) if isinstance(tag, dict) else (None, None)
    if found != (SCHEMA, SCHEMA_VERSION):
        raise ResultsError(
            f"{source} has schema {found[0]} version {found[1]}, this harness reads {SCHEMA} "
            f"version {SCHEMA_VERSION}: read it with the harness that wrote it"
        )
    if _is_deeper(tag, _MAX_DEPTH):
        raise ResultsError(f"{source} is nested more than {_MAX_DEPTH} deep: no harness wrote it")
    header = decode(data, RunHeader, source=source, error=ResultsError)
    header.check(source)
    return header


def _is_deeper(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(part, depth - 1) for part in parts)


def _read_regular(path: Path) -> bytes:
    with _open_regular(path) as file:
        return file.read(MOST_FILE_BYTES)


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe is refused, because reading it may wait for ever."""
    if path.exists() and not path.is_file():
        code = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "Not a regular file")
    return path.open("rb")


def read_records(path: Path, n_ranks: int = _MAX_RANKS) -> tuple[list[Record], list[str]]:
    """Read one rank's lines.

    Returns:
        The records, and what was skipped: the first MAX_NAMED lines with the reason, then how many
        more.

    Raises:
        OSError: the file cannot be read.
    """
    records: list[Record] = []
    problems: list[str] = []
    n_skipped, number = 0, 1
    with _open_regular(path) as file:
        every = iter(partial(file.readline, _MAX_LINE_BYTES), b"")
        while lines := list(islice(every, _LINES_AT_ONCE)):
            found = _decode_all(lines, n_ranks)
            if found is not None:
                records += found
                number += len(lines)
                continue
            for line in lines:
                problem = _decode_into(records, line, n_ranks)
                if problem:
                    n_skipped += 1
                    problems += [f"line {number}: {problem}"] if n_skipped <= MAX_NAMED else []
                number += line.endswith(b"\n")
    if n_skipped > MAX_NAMED:
        problems.append(f"{n_skipped - MAX_NAMED} more lines, {n_skipped} in all")
    return records, problems


def _decode_all(lines: Sequence[bytes], n_ranks: int) -> list[Record] | None:
    """The records of lines which are all in order; None where one is not."""
    try:
        records = _DECODER.decode_lines(b"".join(lines))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_whole = len(records) == len(lines)
    return None if not is_whole or any(record_problem(r, n_ranks) for r in records) else records


def _decode_into(records: list[Record], line: bytes, n_ranks: int) -> str:
    """Decode a line; returns why it is skipped, empty when it is not."""
    if not line.strip():
        return ""
    if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
        return f"longer than {_MAX_LINE_BYTES} bytes"
    try:
        record = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return str(error)
    if problem := record_problem(record, n_ranks):
        return problem
    records.append(record)
    return ""


def _rank_of(path: Path) -> int | None:
    rank = find_int(path.stem.removeprefix("rank"), at_most=MAX_RANK)
    return rank if path.name == f"rank{rank}.jsonl" else None


def read_run(run_dir: Path, results: Results) -> None:
    """Read one run into `results`; unusable lines and files are added to its `skipped`."""
    try:
        header = read_header(run_dir)
    except ResultsError as error:
        results.skipped.append((run_dir, str(error)))
        return
    ranks: dict[int, list[Record]] = {}
    names = {info.rank for info in header.ranks}
    for path in sorted(run_dir.glob("rank*.jsonl")):
        rank = _rank_of(path)
        if rank is None:
            results.skipped.append((path, "not a rank<k>.jsonl file"))
            continue
        if names and rank not in names:
            results.skipped.append((path, f"the run has {len(names)} ranks, not a rank {rank}"))
            continue
        try:
            ranks[rank], problems = read_records(path, len(names) or _MAX_RANKS)
        except OSError as error:
            results.skipped.append((path, error.strerror or str(error)))
            continue
        results.skipped.extend((path, problem) for problem in problems)
    results.skipped.extend(_missing(run_dir, header, ranks))
    results.runs.append(Run(path=run_dir, header=header, ranks=ranks))


def _missing(run_dir: Path, header: RunHeader, ranks: Collection[int]) -> list[tuple[Path, str]]:
    """Ranks of a run that ended ok whose records are not here: its numbers are of the others.

    An imported log, which names its source, may be of one rank alone.
    """
    if header.status != "ok" or not ranks or "source" in header.config:
        return []
    reason = "missing: the numbers of the run are of its other ranks"
    missing = [info.rank for info in header.ranks if info.rank not in ranks]
    return [(run_dir / f"rank{rank}.jsonl", reason) for rank in missing]


def _is_beside_runs(name: str) -> bool:
    return name.startswith(".") or any(fnmatch(name, pattern) for pattern in _BESIDE_RUNS)


def _run_directories(root: Path, results: Results) -> Iterator[Path]:
    """The directories that may be runs; what is none is added to `skipped`."""
    for entry in sorted(root.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            yield entry
        elif not _is_beside_runs(entry.name):
            results.skipped.append((entry, "not a run's directory"))


def read_results(root: Path) -> Results:
    """Read every run below `root` (or `root` itself, when it is a run), oldest first.

    Raises:
        ResultsError: `root` is not a directory, or may not be read.
    """
    if not root.is_dir():
        raise ResultsError(f"{root} is not a directory: give the results directory of a run")
    results = Results()
    try:
        is_run = (root / "run.json").exists()
        for run_dir in [root] if is_run else _run_directories(root, results):
            read_run(run_dir, results)
    except OSError as error:
        raise ResultsError(f"{error.filename or root} cannot be read: {error.strerror}") from None
    results.runs.sort(key=lambda run: run.header.start_utc)
    _drop_copies(results)
    return results


def _drop_copies(results: Results) -> None:
    """Keep one of the directories that hold the same run: a copy is no repeat of it."""
    first: dict[tuple[str, str, str], Run] = {}
    for run in results.runs:
        identity = (run.header.run_id, run.header.key, run.header.start_utc)
        known = first.setdefault(identity, run)
        if known is not run:
            results.skipped.append((run.path, f"the same run as {known.path.name}, counted once"))
    results.runs = list(first.values())

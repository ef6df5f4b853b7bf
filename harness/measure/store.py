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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from harness.domain.files import decode
from harness.domain.labels import MAX_RANK
from harness.domain.record import Record
from harness.domain.run import SCHEMA, SCHEMA_VERSION, RunHeader
from harness.errors import ClusterError, HarnessError, ResultsError
from harness.inputs import MOST_FILE_BYTES, find_int, open_regular, parse_json
from harness.measure.heartbeat import find_dead_writer
from harness.measure.rank_records import MAX_RANKS, Records, read_records
from harness.measure.run_files import HEADER_FILE, RESERVE_FILE

Problem = tuple[Path, str]
"""What cannot be used, and why."""

# What a results directory may hold beside runs.
_BESIDE_RUNS = ("README.md", "cluster.json", "held-graphs.json", "profile-*.json")

_MAX_DEPTH = 16

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
            _keep_space(reserve, len(data) + _RESERVE_BYTES)
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


def _keep_space(reserve: Path, n_bytes: int) -> None:
    """Take blocks; on a file system that has no means to, only the length."""
    with _writing(reserve), reserve.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(n_bytes, _FREE_BYTES))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        file.truncate(n_bytes)


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
    ranks: Mapping[int, list[Record]]


@dataclass
class Results:
    """Every run of a directory, and what was skipped."""

    runs: list[Run] = field(default_factory=list)
    skipped: list[Problem] = field(default_factory=list)


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
            f"version {SCHEMA_VERSION}: run it again, or read it with the harness that wrote it"
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
    with open_regular(path) as file:
        return file.read(MOST_FILE_BYTES)


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
    ranks, problems = read_ranks(run_dir, header)
    results.skipped += problems
    results.runs.append(Run(path=run_dir, header=header, ranks=ranks))


def read_ranks(run_dir: Path, header: RunHeader) -> tuple[dict[int, Records], list[Problem]]:
    """The records of a run by rank, and what cannot be used."""
    ranks: dict[int, Records] = {}
    skipped: list[Problem] = []
    names = {info.rank for info in header.ranks}
    for path in sorted(run_dir.glob("rank*.jsonl")):
        rank = _rank_of(path)
        if rank is None:
            skipped.append((path, "not a rank<k>.jsonl file"))
            continue
        if names and rank not in names:
            skipped.append((path, f"the run has {len(names)} ranks, not a rank {rank}"))
            continue
        try:
            ranks[rank], problems = read_records(path, len(names) or MAX_RANKS)
        except OSError as error:
            skipped.append((path, error.strerror or str(error)))
            continue
        skipped += [(path, problem) for problem in problems]
    return ranks, skipped + _missing(run_dir, header, ranks)


def _missing(run_dir: Path, header: RunHeader, ranks: Collection[int]) -> list[Problem]:
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


def _run_directories(root: Path, skipped: list[Problem]) -> Iterator[Path]:
    """The directories that may be runs; what is none is added to `skipped`."""
    for entry in sorted(root.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            yield entry
        elif not _is_beside_runs(entry.name):
            skipped.append((entry, "not a run's directory"))


def find_runs(root: Path) -> tuple[list[tuple[Path, RunHeader]], list[Problem]]:
    """The directory and header of every run below `root` (or of `root` itself, when it is a run),
    oldest first, and what is no run.

    Raises:
        ResultsError: `root` is not a directory, or may not be read.
    """
    if not root.is_dir():
        raise ResultsError(f"{root} is not a directory: give the results directory of a run")
    found: list[tuple[Path, RunHeader]] = []
    skipped: list[Problem] = []
    try:
        is_run = (root / HEADER_FILE).exists()
        for run_dir in [root] if is_run else _run_directories(root, skipped):
            try:
                found.append((run_dir, read_header(run_dir)))
            except ResultsError as error:
                skipped.append((run_dir, str(error)))
    except OSError as error:
        raise ResultsError(f"{error.filename or root} cannot be read: {error.strerror}") from None
    found.sort(key=lambda one: one[1].start_utc)
    return _without_copies(found, skipped), skipped


def _without_copies(
    found: Sequence[tuple[Path, RunHeader]], skipped: list[Problem]
) -> list[tuple[Path, RunHeader]]:
    """One of the directories that hold the same run: a copy is no repeat of it."""
    first: dict[tuple[str, str, str], tuple[Path, RunHeader]] = {}
    for path, header in found:
        identity = (header.run_id, header.key, header.start_utc)
        known, _ = first.setdefault(identity, (path, header))
        if known is not path:
            skipped.append((path, f"the same run as {known.name}, counted once"))
    return list(first.values())


def read_results(root: Path) -> Results:
    """Read every run that `find_runs` finds.

    Raises:
        ResultsError: `root` is not a directory, or may not be read.
    """
    found, skipped = find_runs(root)
    results = Results(skipped=skipped)
    for run_dir, header in found:
        ranks, problems = read_ranks(run_dir, header)
        results.skipped += problems
        results.runs.append(Run(path=run_dir, header=header, ranks=ranks))
    return results

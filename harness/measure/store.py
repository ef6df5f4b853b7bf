"""Results on disk: `<results>/<run_id>/run.json` and `rank<k>.jsonl`.

A crash loses at most the line being written, because records are appended line by line and the
header is replaced atomically. A full disk loses no more, because the final header goes into blocks
that a running run reserves. Reading skips, counts and names unusable lines and files, so that
derivations get only records whose numbers and labels are within bounds.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import msgspec

from harness.domain.files import decode, encode
from harness.domain.record import MAX_RANK, Record
from harness.domain.run import SCHEMA, SCHEMA_VERSION, RunHeader
from harness.errors import ClusterError, HarnessError, ResultsError
from harness.inputs import MOST_FILE_BYTES, find_int, one_line, open_regular, parse_json
from harness.measure.heartbeat import HEADER_FILE, RESERVE_FILE, find_dead_writer
from harness.measure.rank_records import MAX_RANKS, Records, read_records

_log = logging.getLogger(__name__)

_LONGEST_LINE = 10_000  # of a reason

Problem = tuple[Path, str]
"""An unusable file, and the reason."""
Found = tuple[Path, RunHeader]
SAMPLES = "sample-"  # begins the names of committed runs

# Files that a results directory may hold beside runs.
_BESIDE_RUNS = (
    "README.md",
    "cluster.json",
    "held-graphs.json",
    "profile-*.json",
    "validation-*.json",
)

_MAX_DEPTH = 16

# Most bytes that the final header adds to the first one: a reason with tracebacks, a summary.
_RESERVE_BYTES = 128 * 1024
# A run begins only with this much free space, so that a full disk ends the sweep, not each run.
_FREE_BYTES = 2**20


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert a write error to one that names file and host."""
    full = os.strerror(errno.ENOSPC)
    try:
        yield
    except Exception as error:
        # Libraries that write files raise other errors, which quote the system's message.
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
    """Yield a temporary file, which then replaces `path`; if writing fails, it is removed.

    Raises:
        ResultsError: it cannot be written; names file and host.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old bytes or the new ones, never a mixture.

    Raises:
        ResultsError: it cannot be written; names file and host.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def move_files(source: Path, directory: Path) -> None:
    """Move all files of a directory on the same file system into another, over those there.

    Raises:
        ResultsError: one cannot be replaced; names file and host.
    """
    for path in sorted(source.iterdir()):
        with writing(directory / path.name):
            path.replace(directory / path.name)


def claim_directory(results: Path, run_id: str, number: int) -> str:
    """Make a new run's directory; returns its name, with a number where another launch, which
    began the same run in the same second, has it already."""
    try:
        (results / run_id).mkdir(parents=True)
    except FileExistsError:
        return f"{run_id}-{number}"
    except OSError:  # `write_header` says why
        return run_id
    return run_id


def write_header(run_dir: Path, header: RunHeader) -> None:
    """Write or replace `run.json`; rank 0 only. The final header uses only space that the first one
    reserved.

    Raises:
        ResultsError: it cannot be written; names file and host.
    """
    data = encode(header)
    path, reserve = run_dir / HEADER_FILE, run_dir / RESERVE_FILE
    if header.status == "running":
        try:
            write_atomically(path, data)
            _keep_space(reserve, len(data) + _RESERVE_BYTES)
        except ResultsError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                reserve.unlink(missing_ok=True)
                run_dir.rmdir()
            raise
        return
    if not (reserve.exists() and len(data) <= reserve.stat().st_size):
        reserve.unlink(missing_ok=True)
        write_atomically(path, data)
        return
    with writing(path):
        with reserve.open("r+b") as file:
            file.write(data)
            file.truncate()
            os.fsync(file.fileno())
        reserve.replace(path)


def _keep_space(reserve: Path, n_bytes: int) -> None:
    """Allocate blocks; only set the length if the file system cannot allocate."""
    with writing(reserve), reserve.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(n_bytes, _FREE_BYTES))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        file.truncate(n_bytes)


class RecordWriter:
    """Appends one rank's records; creates the directory, as each node may have its own disk."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Open the rank's file.

        Raises:
            ResultsError: it cannot be written; names file and host. Other methods raise it too.
        """
        self._path = run_dir / f"rank{rank}.jsonl"
        with writing(self._path):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)

    def write(self, records: Iterable[Record]) -> None:
        """Append a line per record, all in one write."""
        data = msgspec.json.Encoder().encode_lines(records)
        with writing(self._path):
            self._append(data)

    def _append(self, data: bytes) -> None:
        """Append all data, or as many whole lines as there is space for."""
        begin = os.fstat(self._file.fileno()).st_size
        n_written = 0
        try:
            while n_written < len(data):
                n_written += self._file.write(data[n_written:])
        except OSError:
            self._file.truncate(begin + data.rfind(b"\n", 0, n_written) + 1)
            raise

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as read: its header and the records of each rank."""

    path: Path
    header: RunHeader
    ranks: Mapping[int, list[Record]]


def read_header(run_dir: Path) -> RunHeader:
    """Read `run.json`; a running run whose writer has died becomes a crash.

    Raises:
        ResultsError: missing, malformed or of another schema or version; names the file.
    """
    path = run_dir / HEADER_FILE
    try:
        with open_regular(path) as file:
            data = file.read(MOST_FILE_BYTES)
        header = _decode_header(data, str(path))
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except ClusterError as error:
        raise ResultsError(f"{path}: {error}") from None
    if header.status == "running" and (reason := find_dead_writer(run_dir)):
        return msgspec.structs.replace(header, status="crash", reason=reason)
    return header


def headers_in(results: Path, pattern: str = "*") -> Iterator[tuple[Path, RunHeader]]:
    """The runs in a directory of results with their headers; other entries are left out, a header
    that cannot be read with a warning.

    Args:
        pattern: of the runs' names.
    """
    for path in results.glob(pattern):
        try:
            header = read_header(path)
        except ResultsError as error:
            if (path / HEADER_FILE).exists():
                _warn(f"left out: {error}")
            continue
        yield path, header


@cache
def _warn(message: str) -> None:
    """Once in a process."""
    _log.warning(message)


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
    lines = (one_line(line, _LONGEST_LINE) for line in header.reason.split("\n"))
    return msgspec.structs.replace(header, reason="\n".join(lines))


def _is_deeper(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(part, depth - 1) for part in parts)


def read_run(run_dir: Path, header: RunHeader) -> tuple[Run, list[Problem]]:
    """Read the records of a run, and list its unusable files and lines."""
    ranks: dict[int, Records] = {}
    skipped: list[Problem] = []
    names = {info.rank for info in header.ranks}
    for path in sorted(run_dir.glob("rank*.jsonl")):
        rank = find_int(path.stem.removeprefix("rank"), at_most=MAX_RANK)
        if rank is None or path.name != f"rank{rank}.jsonl":
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
    if any(ranks.values()) or not skipped:  # else it is said why there are none
        skipped += _missing(run_dir, header, ranks)
    return Run(path=run_dir, header=header, ranks=ranks), skipped


def _missing(run_dir: Path, header: RunHeader, ranks: Mapping[int, Records]) -> list[Problem]:
    """Report ranks without records in a run that ended ok, because its numbers leave them out; of a
    run without any the first.

    An imported log, which names its source, may have one rank only.
    """
    if header.status != "ok" or "source" in header.config:
        return []
    missing = [info.rank for info in header.ranks if not ranks.get(info.rank)]
    reason = "missing or empty: the numbers of the run are of its other ranks"
    if not any(ranks.values()):
        missing, reason = missing[:1], "missing or empty, as of all ranks: the run has no numbers"
    return [(run_dir / f"rank{rank}.jsonl", reason) for rank in missing]


def _run_directories(root: Path, skipped: list[Problem]) -> Iterator[Path]:
    """Directories that may be runs; other entries are added to `skipped`."""
    for entry in sorted(root.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield entry
        elif not any(fnmatch(entry.name, pattern) for pattern in _BESIDE_RUNS):
            skipped.append((entry, "not a run's directory"))


def find_runs(root: Path) -> tuple[list[Found], list[Problem]]:
    """The directory and header of every run below `root` (or of `root` itself, if it is a run),
    oldest first, and the entries that are not runs.

    Raises:
        ResultsError: `root` is not a directory, or may not be read.
    """
    if not root.is_dir():
        raise ResultsError(f"{root} is not a directory: give the results directory of a run")
    found: list[Found] = []
    skipped: list[Problem] = []
    try:
        is_run = (root / HEADER_FILE).exists()
        for run_dir in [root] if is_run else _run_directories(root, skipped):
            try:
                found.append((run_dir, read_header(run_dir)))
            except ResultsError as error:
                is_folder = any(run_dir.glob(f"*/{HEADER_FILE}"))
                skipped.append(
                    (run_dir, "holds runs: give it by itself" if is_folder else str(error))
                )
    except OSError as error:
        raise ResultsError(f"{error.filename or root} cannot be read: {error.strerror}") from None
    found.sort(key=lambda one: one[1].start_utc)
    return _without_copies(found, skipped), skipped


def without_samples(found: Sequence[Found]) -> tuple[list[Found], list[Problem]]:
    """Runs less the samples that come with the harness, unless they are all there is."""
    own = [(path, header) for path, header in found if not path.name.startswith(SAMPLES)]
    n_samples = len(found) - len(own)
    if not own or not n_samples:
        return list(found), []
    reason = f"{n_samples} runs that come with the harness are left out beside others"
    return own, [(own[0][0].with_name(f"{SAMPLES}*"), reason)]


def _without_copies(found: Sequence[Found], skipped: list[Problem]) -> list[Found]:
    """Keep one of several directories with the same run, because a copy is not a repeat."""
    first: dict[tuple[str, str, str], Found] = {}
    for path, header in found:
        identity = (header.run_id, header.key, header.start_utc)
        known, _ = first.setdefault(identity, (path, header))
        if known is not path:
            skipped.append((path, f"the same run as {known.name}, counted once"))
    return list(first.values())

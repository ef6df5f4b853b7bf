"""Test that every reader refuses broken files with a one-line error, in bounded time and memory.

    python benchmarks/fuzz_readers.py [--cases N] [--only READER ...] [--seed S] [--keep DIR]
                                      [--json]

Each reader (`fuzz_cases.READERS`) gets mutations of valid files (`fuzz_mutations`), in a separate
process. It must accept a mutation, or refuse it by a HarnessError of one line. Anything else is an
escape: other exceptions, over a second of processor time, or over 200 MiB of additional memory. The
exit code is 1 if one escaped; `--keep` writes it to a file. Equal seeds give equal mutations.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from comparison import provenance
from fuzz_cases import READERS, Reader
from fuzz_mutations import mutate

from harness.errors import HarnessError
from harness.measure.peak_rss import peak_rss_bytes

MOST_S = 1.0
MOST_MIB = 200.0
_HANG_CPU_S, _HANG_S = 5, 60


@dataclass(frozen=True)
class Reading:
    """Outcome of one mutation; `escape` is empty if the reader accepted or refused it."""

    escape: str
    was_read: bool
    cpu_s: float
    held_mib: float


@dataclass
class Tally:
    """Outcomes of all mutations of a reader.

    Attributes:
        worst_s: processor seconds of the slowest mutation.
        worst_mib: largest additional memory of the process for a mutation.
        escapes: number of escapes by kind.
    """

    reader: str
    n: int = 0
    n_refused: int = 0
    n_read: int = 0
    n_escaped: int = 0
    worst_s: float = 0.0
    worst_mib: float = 0.0
    escapes: dict[str, int] = field(default_factory=dict)

    def add(self, found: Reading) -> None:
        self.n += 1
        self.n_escaped += bool(found.escape)
        self.n_read += found.was_read and not found.escape
        self.n_refused += not found.was_read and not found.escape
        self.worst_s = max(self.worst_s, found.cpu_s)
        self.worst_mib = max(self.worst_mib, found.held_mib)
        if found.escape:
            self.escapes[found.escape] = self.escapes.get(found.escape, 0) + 1


class Hang(BaseException):
    """A mutation took too much processor time or wall time."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise Hang


def _set_limits(cpu_s: float, wall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def catch_hangs() -> None:
    """Raise `Hang` in the main thread when a limit is exceeded."""
    signal.signal(signal.SIGALRM, _stop)
    signal.signal(signal.SIGPROF, _stop)


def begin_peak() -> float:
    """Reset this process's peak of memory; returns its current memory in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes() / 2**20


def read(reader: Reader, data: bytes, folder: Path) -> Reading:
    """Read a mutation under limits of time; returns the outcome."""
    began_s, before_mib = time.process_time(), begin_peak()
    _set_limits(_HANG_CPU_S, _HANG_S)
    try:
        reader.read(data, folder)
        escape, was_read = "", True
    except HarnessError as error:
        escape, was_read = ("a message of several lines" if "\n" in str(error) else ""), False
    except Hang:
        escape, was_read = "hang", False
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        escape, was_read = f"{type(error).__name__} in {where}", False
    finally:
        _set_limits(0, 0)
    cpu_s, held_mib = time.process_time() - began_s, peak_rss_bytes() / 2**20 - before_mib
    if not escape and (cpu_s > MOST_S or held_mib > MOST_MIB):
        escape = "slow" if cpu_s > MOST_S else "memory"
    return Reading(escape, was_read, cpu_s, held_mib)


def fuzz(name: str, n_cases: int, seed: int, keep: Path | None) -> Tally:
    """Read `n_cases` mutations of a reader's files."""
    reader, random, tally = READERS[name], Random(f"{seed} {name}"), Tally(name)
    catch_hangs()
    with tempfile.TemporaryDirectory() as folder:
        seeds = reader.seeds()
        for data in seeds:  # excludes imports and caches from the reader's memory
            reader.read(data, Path(folder))
        for case in range(n_cases):
            data = mutate(random, random.choice(seeds))
            found = read(reader, data, Path(folder))
            tally.add(found)
            if found.escape and keep is not None and tally.escapes[found.escape] == 1:
                (keep / f"{name}-{found.escape.split()[0]}-{case}").write_bytes(data)
    return tally


def tallies(names: list[str], arguments: argparse.Namespace) -> Iterator[Tally]:
    """Run each reader in a new process, so that the peak of memory is the reader's."""
    for name in names:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            call = pool.submit(fuzz, name, arguments.cases, arguments.seed, arguments.keep)
            try:
                yield call.result()
            except BrokenProcessPool:
                yield Tally(name, arguments.cases, n_escaped=1, escapes={"its process ended": 1})


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000, help="mutations of each reader")
    parser.add_argument("--only", nargs="+", choices=READERS, help="these readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a directory for the first of each escape")
    parser.add_argument("--json", action="store_true", help="one object per reader")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Fuzz the selected readers; returns the exit code, 1 if there was an escape."""
    arguments = parse(argv)
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    n_escaped = 0
    for tally in tallies(arguments.only or list(READERS), arguments):
        n_escaped += tally.n_escaped
        row: dict[str, Any] = asdict(tally)
        row |= {"seed": arguments.seed, **provenance()}
        print(json.dumps(row) if arguments.json else _line(tally), flush=True)
    return 1 if n_escaped else 0


def _line(tally: Tally) -> str:
    escapes = "".join(f"; {n} {escape}" for escape, n in tally.escapes.items())
    return (
        f"{tally.reader:20} {tally.n} mutations: {tally.n_refused} refused, {tally.n_read} read, "
        f"{tally.n_escaped} escaped, at most {tally.worst_s:.2f} s and {tally.worst_mib:.0f} MiB"
        + escapes
    )


if __name__ == "__main__":
    sys.exit(main())

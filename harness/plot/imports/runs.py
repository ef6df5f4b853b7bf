"""The interface of a reader of foreign logs: a log, the runs in it, and how it reads text."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import tyro

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.record import Record
from harness.domain.run import RankInfo, RunHeader, run_key
from harness.errors import ResultsError
from harness.inputs import CODECS, find_number
from harness.measure.store import write_atomically, write_header
from harness.units import parse_bytes

MAX_BYTES = 512 * 2**20
# Of each rank: its index on its host, kind, memory in bytes.
Devices = list[tuple[int, str, int]]


@dataclass(frozen=True, kw_only=True)
class ImportFacts:
    """Facts that logs lack and the user supplies."""

    model: str = "vit_b_16"
    """Model that was trained."""
    dataset: str = "cifar10"
    """Data set that it was trained on."""
    dtype: str = "fp32"
    """Data type of training."""
    strategy: str = "deepspeed_zero0"
    """Strategy of training."""
    batch_per_device: int = 16
    """Samples of a micro-step, if a log shows several in a step."""
    epoch_samples: int = 50_000
    """Samples of one epoch of the whole data set."""
    weak_share: float = 0.1
    """Share of the data set that each device trains in a weak scaling log."""
    device_kind: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """GPU of ranks for which the log names none, if no CSV in its directory has the same number of
    GPUs."""
    device_memory: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """Memory of GPUs for which the log names none, such as 8GiB."""


class Log(NamedTuple):
    """A log to read.

    Attributes:
        name: of its (first) run.
        skipped: reasons for lines that are not used; readers append to it.
    """

    path: Path
    text: str
    name: str
    facts: ImportFacts
    skipped: list[str]

    @property
    def given_device(self) -> tuple[str, int] | None:
        """Kind and memory of the GPUs, if flags say them."""
        kind, memory = self.facts.device_kind, self.facts.device_memory
        return (kind, parse_bytes(memory)) if kind and memory else None

    def config(self, n_ranks: int, **more: Any) -> dict[str, Any]:
        """A run's configuration, by the facts of flags."""
        names = ("strategy", "model", "dataset", "dtype", "batch_per_device")
        return {
            **{name: getattr(self.facts, name) for name in names},
            "global_batch": self.facts.batch_per_device * n_ranks,
            **more,
            "source": self.path.name,
        }


class ImportedRun(NamedTuple):
    """A run that a log holds: its records by rank, and its end in seconds from its start."""

    run_id: str
    config: dict[str, Any]
    devices: Devices
    records: dict[int, list[Record]]
    start: datetime | None = None
    duration_s: float | None = None
    repeat: int = 0

    def header(self) -> RunHeader:
        cluster = _cluster(self.devices)
        nodes = cluster.node_of()
        return RunHeader(
            run_id=self.run_id,
            workload="train",
            key=run_key("train", self.config, cluster),
            repeat=self.repeat,
            argv=[],
            config=self.config,
            cluster=cluster,
            ranks=[
                RankInfo(
                    rank=rank,
                    hostname=cluster.nodes[nodes[rank]].name,
                    device=f"cuda:{index}",
                    device_kind=kind,
                    n_cores=0,
                    memory_bytes=memory,
                )
                for rank, (index, kind, memory) in enumerate(self.devices)
            ],
            versions={},
            commit="",
            start_utc=self.start.isoformat(timespec="seconds") if self.start else "",
            status="ok",
            duration_s=self.duration_s,
        )

    def write(self, into: Path) -> Path:
        """Write it; records first, so that a header never exists without them."""
        run_dir = into / self.run_id
        run_dir.mkdir(parents=True, exist_ok=True)
        for rank, of_rank in self.records.items():
            lines = msgspec.json.Encoder().encode_lines(of_rank)
            write_atomically(run_dir / f"rank{rank}.jsonl", lines)
        names = {f"rank{rank}.jsonl" for rank in self.records}
        for file in run_dir.glob("rank*.jsonl"):
            if file.name not in names:
                file.unlink()
        write_header(run_dir, self.header())
        return run_dir


class LogReader(NamedTuple):
    """One row of READERS.

    Attributes:
        matches: whether a text is of this kind.
        read: its runs, with spans of steps or samples `epoch_s` and `n_samples` as runs of ours
            have; raises ResultsError where no line is usable.
    """

    matches: Callable[[str], bool]
    read: Callable[[Log], list[ImportedRun]]


def read_text(path: Path) -> str:
    """A log's text.

    Raises:
        ResultsError: it is too large.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ResultsError(f"{path} is larger than {MAX_BYTES // 2**20} MiB: import a part of it")
    return decode(path.read_bytes())


def n_gpus_named(path: Path) -> int | None:
    """The number of GPUs in a file's name, such as `x_3gpu.log`."""
    match = re.search(r"(?<!\d)(\d{1,5})[ _-]?gpus?(?![a-z])", path.stem.lower(), re.ASCII)
    return int(match[1]) if match and int(match[1]) else None


def extent_of(
    intervals: Sequence[tuple[datetime | None, float]],
) -> tuple[datetime | None, float | None]:
    """Start of the first interval and seconds to the last end, from ends and lengths."""
    starts = (at - timedelta(seconds=length) for at, length in intervals if at)
    origin = min(starts, default=None)
    return origin, seconds_at(max((at for at, _ in intervals if at), default=None), origin)


def seconds_at(at: datetime | None, origin: datetime | None) -> float | None:
    """Seconds of a time since an origin; None if one is unknown."""
    return (at - origin).total_seconds() if at and origin else None


def _cluster(devices: Devices) -> Cluster:
    """Place ranks with equal device indices on different nodes; others share one."""
    indices = [index for index, _, _ in devices]
    is_shared = len(indices) > 1 and len(set(indices)) == len(indices)
    made = [
        Device(name=f"node{0 if is_shared else r}:{index}", kind=kind, memory_bytes=memory)
        for r, (index, kind, memory) in enumerate(devices)
    ]
    groups = [made] if is_shared else [[device] for device in made]
    return Cluster(nodes=[Node(name=f"node{i}", devices=group) for i, group in enumerate(groups)])


# Terminal colours and cursor movements; their parameters are short.
_ESCAPE = re.compile("\x1b(?:\\[[0-?]{0,32}[ -/]{0,4}[@-~]|[@-Z\\\\^_])")
_N_NAMED = 3
# A comma groups thousands (1,234.5) or is decimal (1,5); three digits after one are ambiguous.
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,(?:[0-9]{1,2}|[0-9]{4,9})")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3}){1,6}\.[0-9]{1,9}")
_THOUSAND_POINTS = re.compile(r"[+-]?[0-9]{1,3}(?:\.[0-9]{3}){1,6},[0-9]{1,9}")


def decode(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 by its mark or zero bytes; a wrong byte affects only its line."""
    for mark, codec in CODECS:
        if data.startswith(mark):
            return data.decode(codec, errors="replace")
    head = data[:4096]
    for at, codec in ((1, "utf-16-le"), (0, "utf-16-be")):
        if head[at::2].count(0) > 0.8 * len(head[at::2]) > 0:
            return data.decode(codec, errors="replace")
    return data.decode("utf-8", errors="replace")


def plain(line: str) -> str:
    """A line without terminal colours."""
    return _ESCAPE.sub("", line) if "\x1b" in line else line


def read_number(text: str, at_least: float = 0.0, at_most: float = 1e12) -> float | None:
    """A number with a decimal point or comma, with groups of thousands if it has both; None for
    any other text, for ambiguous text (`1,234`), and out of bounds."""
    text = text.strip()
    if len(text) > 40:
        return None
    if _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    elif _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    elif _THOUSAND_POINTS.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    return find_number(text, at_least, at_most)


def group(skipped: list[tuple[int, str]]) -> list[str]:
    """One line per reason: its first lines, and the number of others."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for number, reason in skipped:
        counts[reason] += 1
        if counts[reason] <= _N_NAMED:
            problems.append(f"line {number}: {reason}")
    for reason, count in counts.items():
        if count > _N_NAMED:
            problems.append(f"{count - _N_NAMED} more lines: {reason}")
    if len(skipped) > _N_NAMED:
        problems.append(f"{len(skipped)} lines were skipped in all")
    return problems


def most_common(skipped: list[tuple[int, str]]) -> str:
    """The most common reason of skipping, with its number of lines."""
    (reason, count), *_ = Counter(reason for _, reason in skipped).most_common(1)
    return f"{count} lines: {reason}"

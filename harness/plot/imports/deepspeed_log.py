"""DeepSpeed's wall-clock lines: milliseconds of the parts of a step, from one rank.

    [2024-11-17 16:35:04,660] [INFO] [...] [Rank 0] time (ms) | fwd: 64.13 | bwd: 710.89 | ...

`bwd` is `bwd_inner` (computing) plus `bwd_allreduce`; `step` is the optimizer; before 0.10 the
names are `forward`, `backward`, .... The line has no data loading, so a step is fwd + bwd + step.
The step's line sums the micro-steps (`fwd_microstep`) before it; their number is the gradient
accumulation. Lines may contain launcher prefixes, terminal colours and progress bars.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mode

from harness.domain.record import Record, Span
from harness.errors import ResultsError
from harness.inputs import find_int
from harness.plot.imports.epoch_csv import parse_time
from harness.plot.imports.epochs import devices_beside
from harness.plot.imports.runs import (
    ImportedRun,
    Log,
    LogReader,
    extent_of,
    group,
    most_common,
    n_gpus_named,
    plain,
    read_number,
    seconds_at,
)

MARK = "time (ms)"
STAMP = re.compile(r"\[(?P<at>\d{4}-\d\d-\d\d[T ][^\]]{1,40})\]", re.ASCII)
# `[Rank 0]`, `rank=0` in old versions, mpirun's `[1,0]<stdout>`.
RANKS = (
    re.compile(r"\[Rank (\d{1,5})\]", re.ASCII),
    re.compile(r"\brank=(\d{1,5})\b", re.ASCII),
    re.compile(r"^\[\d{1,9},(\d{1,5})\]<std", re.ASCII),
)
# All versions print two decimals; a progress bar may follow.
_VALUE_AND_MORE = re.compile(r"([0-9][0-9.,]{0,20}[.,][0-9]{2})(?![0-9.,])")
_NAME = re.compile(r"[A-Za-z0-9_ ()-]{1,60}", re.ASCII)
# Of timers, the begin of the name in versions from 0.10.
_NEW = {"forward": "fwd", "backward": "bwd"}
_STEP = {"fwd", "bwd", "step"}
_MOST_RANKS = 16384
_MOST_MS = 1e10
# Timers are read one after another, so the parts of bwd may exceed it a little.
_MOST_EXCESS, _MOST_EXCESS_MS = 1.05, 1.0

CUT = "cut off"
MALFORMED = "not fwd, bwd and step in milliseconds"
MEGATRON = "Megatron's own timers, which have no step"
FAR_RANK = f"its rank is above {_MOST_RANKS}"
NO_TIME = "its step takes no time"
LONG_PARTS = "bwd_inner and bwd_allreduce take longer than bwd"
MICRO_ONLY = "a micro-step without the line of its step (fwd, bwd, step)"

_TRACEBACK = "Traceback (most recent call last):"
_EXIT = re.compile(r"exits with return code = (-?[1-9]\d{0,9})\b", re.ASCII)  # its launcher
_MOST_TRACEBACK_LINES, _MOST_ERROR = 200, 160


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """One step of one rank, in seconds.

    Attributes:
        backward_s: without the all-reduce if the log lists it separately.
        allreduce_s: None if the log does not list it.
        step_s: the whole step: forward, backward with all-reduce, optimizer.
        n_microsteps: number of summed micro-steps; 0 if the log does not list them.
    """

    rank: int
    at: datetime | None
    forward_s: float
    backward_s: float
    allreduce_s: float | None
    optimizer_s: float
    step_s: float
    n_microsteps: int = 0


def is_deepspeed_log(text: str) -> bool:
    """Whether the text contains a wall-clock line with a forward part."""
    lines = (line for line in text.splitlines() if MARK in line)
    return any("fwd" in line or "forward" in line for line in lines)


def _parts(text: str) -> dict[str, float] | None:
    """Milliseconds by name; None if a part is malformed, for example in a truncated line."""
    parts: dict[str, float] = {}
    for piece in text.split("|"):
        name, colon, value = piece.partition(":")
        if not colon and "step" in parts:
            return parts  # a progress bar follows
        ms = read_number(value, at_most=_MOST_MS)
        bar = _VALUE_AND_MORE.match(value.strip()) if ms is None else None
        if bar is not None:
            ms = read_number(bar[1], at_most=_MOST_MS)
        first, _, rest = name.strip().partition("_")
        name = "_".join(filter(None, (_NEW.get(first, first), rest)))
        if ms is None or not _NAME.fullmatch(name) or name in parts:
            return None
        parts[name] = ms
        if bar is not None:
            return parts
    return parts


def _rank(line: str) -> int | None:
    """The rank that a line names, 0 without one; None if it is out of bounds."""
    found = (match for pattern in RANKS if (match := pattern.search(line)))
    match = next(found, None)
    return find_int(match[1], 0, _MOST_RANKS) if match else 0


def _problem(parts: dict[str, float]) -> str:
    """Why the times of a step contradict each other; empty if they do not."""
    if not any(parts[name] for name in _STEP):
        return NO_TIME
    inner = parts.get("bwd_inner", 0.0) + parts.get("bwd_allreduce", 0.0)
    return LONG_PARTS if inner > _MOST_EXCESS * parts["bwd"] + _MOST_EXCESS_MS else ""


def _step(line: str, rank: int, parts: dict[str, float], n_microsteps: int) -> StepLine:
    stamp = STAMP.search(line)
    seconds = {name: ms * 1e-3 for name, ms in parts.items()}
    return StepLine(
        rank=rank,
        at=parse_time(stamp["at"]) if stamp else None,
        forward_s=seconds["fwd"],
        backward_s=seconds.get("bwd_inner", seconds["bwd"]),
        allreduce_s=seconds.get("bwd_allreduce"),
        optimizer_s=seconds["step"],
        step_s=seconds["fwd"] + seconds["bwd"] + seconds["step"],
        n_microsteps=n_microsteps,
    )


class _Reader:
    """Reads lines in order; collects the micro-steps of each rank until their step's line."""

    def __init__(self) -> None:
        self.steps: list[StepLine] = []
        self.skipped: list[tuple[int, str]] = []
        self._waiting: dict[int, list[int]] = {}

    def take(self, number: int, line: str, is_cut: bool) -> None:
        head, mark, text = line.partition(MARK)
        if not mark or "|" not in text:
            return  # a line of another kind
        rank = _rank(head)
        parts = _parts(text.lstrip().removeprefix("|"))
        if is_cut:
            # The last number of an incomplete line may be truncated and still be a number.
            self.skipped.append((number, CUT))
        elif parts is None:
            self.skipped.append((number, MALFORMED))
        elif rank is None:
            self.skipped.append((number, FAR_RANK))
        elif "fwd_microstep" in parts:
            self._waiting.setdefault(rank, []).append(number)
        elif parts.keys() >= _STEP and (problem := _problem(parts)):
            self.skipped.append((number, problem))
        elif parts.keys() >= _STEP:
            n_microsteps = len(self._waiting.pop(rank, []))
            self.steps.append(_step(head, rank, parts, n_microsteps))
        elif "fwd" in parts or "bwd" in parts:
            is_megatron = "optimizer" in parts or "bwd-bwd" in parts or "batch generator" in parts
            self.skipped.append((number, MEGATRON if is_megatron else MALFORMED))
        # Timers of ZeRO's optimizer and the like are parts of `step`.

    def finish(self) -> None:
        """Report leftover micro-steps, but not if the log has steps: it often ends within one."""
        if not self.steps:
            self.skipped += [(n, MICRO_ONLY) for numbers in self._waiting.values() for n in numbers]
            self.skipped.sort()


def parse_deepspeed_log(text: str, path: Path) -> tuple[list[StepLine], list[str]]:
    """Read a log's text; ignores lines of other kinds, and names and counts unusable ones.

    Raises:
        ResultsError: no step line is usable; names the path.
    """
    reader = _Reader()
    whole = text.split("\n")
    is_cut = not text.endswith(("\n", "\r"))
    for number, lines in enumerate(whole, start=1):
        pieces = lines.split("\r")  # a progress bar overwrites its line
        for index, line in enumerate(pieces, start=1):
            if MARK in line:
                is_last = number == len(whole) and index == len(pieces)
                reader.take(number, plain(line), is_cut and is_last)
    reader.finish()
    if not reader.steps:
        why = f": {most_common(reader.skipped)}" if reader.skipped else ""
        raise ResultsError(f"{path} holds no usable DeepSpeed step line{why}")
    return reader.steps, group(reader.skipped)


def ending(text: str) -> str:
    """The error that ended the training after its last step; empty if the log names none."""
    _, _, rest = text.rpartition(MARK)
    head, traceback, tail = rest.partition(_TRACEBACK)
    if traceback:
        prefix = plain(head.rpartition("\n")[2])  # torchrun writes `[rank0]: ` before each line
        for line in tail.splitlines()[1:_MOST_TRACEBACK_LINES]:
            told = plain(line).removeprefix(prefix)
            if told and not told[0].isspace():
                return told[:_MOST_ERROR]
    code = _EXIT.search(rest)
    return f"its launcher reports exit code {code[1]}" if code else ""


def accumulation(steps: list[StepLine]) -> int:
    """The most common number of micro-steps of a step; 1 if the log does not list them."""
    return mode([line.n_microsteps for line in steps if line.n_microsteps] or [1])


def _step_records(steps: Sequence[StepLine], origin: datetime | None) -> list[Record]:
    """Spans end at their line's time; without times they follow each other."""
    records: list[Record] = []
    reached_s = 0.0
    for index, line in enumerate(steps):
        end_s = seconds_at(line.at, origin)
        start_s = max(reached_s, (end_s if end_s is not None else 0.0) - line.step_s)
        reached_s = start_s + line.step_s
        records.append(Span(kind="step", step=index, start_s=start_s, duration_s=line.step_s))
        at = start_s
        for kind, span_name, duration_s in (
            ("forward", "fwd", line.forward_s),
            ("backward", "bwd_inner", line.backward_s),
            ("communication", "bwd_allreduce", line.allreduce_s),
            ("optimizer", "step", line.optimizer_s),
        ):
            if duration_s is not None:
                records.append(
                    Span(kind=kind, name=span_name, step=index, start_s=at, duration_s=duration_s)  # type: ignore[arg-type]
                )
                at += duration_s
    return records


def _read(log: Log) -> list[ImportedRun]:
    steps, skipped = parse_deepspeed_log(log.text, log.path)
    log.skipped.extend(skipped)
    if error := ending(log.text):
        log.skipped.append(f"training ended with an error ({error}): its steps are kept")
    by_rank: dict[int, list[StepLine]] = defaultdict(list)
    for line in steps:
        by_rank[line.rank].append(line)
    n_ranks = max(n_gpus_named(log.path) or 1, max(by_rank) + 1)
    devices = devices_beside(log, n_ranks)
    origin, end_s = extent_of([(line.at, line.step_s) for line in steps])
    n_micro = accumulation(steps)
    config = log.config(n_ranks)
    if n_micro > 1:
        # A device trains its batch in each micro-step; all are one step of the optimizer.
        config |= {"accumulation": n_micro, "global_batch": config["global_batch"] * n_micro}
    records = {rank: _step_records(lines, origin) for rank, lines in sorted(by_rank.items())}
    return [ImportedRun(log.name, config, devices, records, origin, end_s)]


READER = LogReader(is_deepspeed_log, _read)

"""DeepSpeed's wall-clock lines: milliseconds of the parts of a step, from one rank.

    [2024-11-17 16:35:04,660] [INFO] [...] [Rank 0] time (ms) | fwd: 64.13 | bwd: 710.89 | ...

`bwd` is `bwd_inner` (computing) and then `bwd_allreduce`; `step` is the optimizer. The line says
nothing of data loading, so none is made up: a step is fwd + bwd + step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness.errors import ResultsError
from harness.plot.imports.epoch_csv import parse_time

LINE = re.compile(r"time \(ms\)\s*\|(?P<parts>.*)$")
PART = re.compile(r"\s*(?P<name>[a-z_]+)\s*:\s*(?P<ms>[0-9]+(?:\.[0-9]+)?)\s*")
STAMP = re.compile(r"\[(?P<at>\d{4}-\d\d-\d\d[T ][^\]]+)\]")
RANK = re.compile(r"\[Rank (?P<rank>\d+)\]")


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """One step of one rank, in seconds.

    Attributes:
        backward_s: without the all-reduce where the log tells them apart.
        allreduce_s: None where the log does not name it.
        step_s: the whole: forward, backward with all-reduce, optimizer.
    """

    rank: int
    at: datetime | None
    forward_s: float
    backward_s: float
    allreduce_s: float | None
    optimizer_s: float
    step_s: float


def is_deepspeed_log(text: str) -> bool:
    """Whether a wall-clock line with a forward part stands anywhere in the text."""
    return any("fwd:" in match["parts"] for match in map(LINE.search, text.splitlines()) if match)


def _parts(text: str) -> dict[str, float] | None:
    """Seconds by name; None when a part is malformed, as in a line that was cut."""
    parts = {}
    for piece in text.split("|"):
        match = PART.fullmatch(piece)
        if match is None:
            return None
        parts[match["name"]] = float(match["ms"]) * 1e-3
    return parts


def _step(line: str, parts: dict[str, float]) -> StepLine:
    stamp, rank = STAMP.search(line), RANK.search(line)
    return StepLine(
        rank=int(rank["rank"]) if rank else 0,
        at=parse_time(stamp["at"]) if stamp else None,
        forward_s=parts["fwd"],
        backward_s=parts.get("bwd_inner", parts["bwd"]),
        allreduce_s=parts.get("bwd_allreduce"),
        optimizer_s=parts["step"],
        step_s=parts["fwd"] + parts["bwd"] + parts["step"],
    )


def parse_deepspeed_log(text: str, path: Path) -> tuple[list[StepLine], list[str]]:
    """Read a log's text; lines of other kinds are passed over, cut ones named.

    Raises:
        ResultsError: no step line is usable; names the path.
    """
    steps: list[StepLine] = []
    problems: list[str] = []
    lines = text.splitlines()
    is_cut = not text.endswith(("\n", "\r"))
    for number, line in enumerate(lines, start=1):
        match = LINE.search(line)
        if match is None or "fwd_microstep" in match["parts"]:
            continue  # microsteps are summed in the line that follows them
        parts = _parts(match["parts"])
        # The last number of a line without an end may be cut short and still look like one.
        if parts is None or not {"fwd", "bwd", "step"} <= parts.keys():
            problems.append(f"line {number}: not fwd, bwd and step in milliseconds")
        elif is_cut and number == len(lines):
            problems.append(f"line {number}: cut off")
        else:
            steps.append(_step(line, parts))
    if not steps:
        raise ResultsError(f"{path} holds no usable DeepSpeed step line")
    return steps, problems

"""torchtitan's metric lines: the loss, the memory and the time of steps, from one or more ranks.

    [rank0]:[titan] 2025-11-25 19:45:01,542 - root - INFO - step:  3  loss:  6.9532  grad_norm: ...
        1.9775  memory:  1.34GiB(0.96%)  tps: 359,546  tflops: 25.74  mfu: 2.60%

A line is written every few steps (`log_freq`). Its step time is the time since the rank's line
before, over the steps between both. The first line has none, because the first step compiles.
Lines before the first step name the model, the GPU, the mesh and the batch.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from math import prod
from typing import Any

from harness.domain.record import Record, Sample, Span
from harness.errors import ResultsError
from harness.inputs import find_int, find_number
from harness.plot.imports.epoch_csv import parse_time
from harness.plot.imports.epochs import devices_beside
from harness.plot.imports.runs import (
    Devices,
    ImportedRun,
    Log,
    LogReader,
    extent_of,
    group,
    n_gpus_named,
    plain,
    seconds_at,
)

_METRICS = re.compile(
    r"\bstep: {1,9}(?P<step>\d{1,9}) .{0,40}\bloss: {0,9}(?P<loss>\S{1,20}) .{0,60}"
    r"\bmemory: {0,9}(?P<gib>\d{1,6}\.\d\d)GiB.{0,40}\btps: {0,9}(?P<tps>[\d,]{1,15})",
    re.ASCII,
)
_STAMP = re.compile(r"(?P<at>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)[,.](?P<parts>\d{3,6})", re.ASCII)
_RANK = re.compile(r"\[rank(\d{1,5})\]", re.ASCII)
_BATCH = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}),"
    r" gradient.accumulation.steps:? (\d{1,9}), sequence length (\d{1,9})",
    re.ASCII,
)
_MESH = re.compile(r"device mesh with \[([^\]]{1,200})\], \[([\d, ]{1,80})\]", re.ASCII)
_MODEL = re.compile(r"Model (\S{1,60}) (\S{1,60}) size: ")
_GPU = re.compile(r"capacity: (.{1,80}?) with ([\d.]{1,12})GiB memory")
_DATA_PARALLEL = re.compile(r"Applied (FSDP|HSDP|DDP)\b")
_MOST_RANKS, _EACH, _GIB = 16384, 8, 2.0**30

NO_STEP = "its step does not follow that of the line before"
NO_TIME = "it has no time after that of the line before"


@dataclass(frozen=True, kw_only=True)
class TitanLine:
    """One metric line.

    Attributes:
        number: of the line in the log.
        memory_bytes: reserved by the allocator, at most, since the line before.
    """

    number: int
    rank: int
    step: int
    at: datetime | None
    loss: float | None
    memory_bytes: float


def is_torchtitan_log(text: str) -> bool:
    """Whether the text has a metric line."""
    return any("tps:" in line and _METRICS.search(plain(line)) for line in text.splitlines())


def _lines(text: str) -> Iterator[TitanLine]:
    """The metric lines, each step of a rank once: ranks without a prefix write alike."""
    seen: set[tuple[int, int]] = set()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = plain(raw) if "tps:" in raw else ""
        found = _METRICS.search(line)
        if found is None:
            continue
        named, stamp = _RANK.search(line), _STAMP.search(line)
        rank, step = int(named[1]) if named else 0, int(found["step"])
        if rank >= _MOST_RANKS or (rank, step) in seen:
            continue
        seen.add((rank, step))
        yield TitanLine(
            number=number,
            rank=rank,
            step=step,
            at=parse_time(f"{stamp['at']}.{stamp['parts']:0<6}") if stamp else None,
            loss=find_number(found["loss"]),
            memory_bytes=float(found["gib"]) * _GIB,
        )


def _samples(lines: Iterable[TitanLine], origin: datetime | None) -> list[Record]:
    records: list[Record] = []
    for line in lines:
        time_s = seconds_at(line.at, origin)
        if line.loss is not None:
            records.append(Sample(metric="loss", value=line.loss, step=line.step, time_s=time_s))
        memory = Sample(
            metric="memory_peak_bytes", value=line.memory_bytes, labels={"kind": "reserved"}
        )
        records.append(memory)
    return records


def _spans(
    lines: list[TitanLine], origin: datetime | None, skipped: list[tuple[int, str]]
) -> list[Record]:
    """A step for each line but the first: the mean of those since the line before."""
    spans: list[Record] = []
    for before, line in pairwise(lines):
        start_s, end_s = seconds_at(before.at, origin), seconds_at(line.at, origin)
        if line.step <= before.step:
            skipped.append((line.number, NO_STEP))
        elif start_s is None or end_s is None or end_s <= start_s:
            skipped.append((line.number, NO_TIME))
        else:
            step_s = (end_s - start_s) / (line.step - before.step)
            spans.append(
                Span(kind="step", step=line.step, start_s=end_s - step_s, duration_s=step_s)
            )
    return spans


def _devices(log: Log, n_ranks: int) -> Devices:
    """The GPU that the log names, one node of up to eight; else those that flags give."""
    gpu = _GPU.search(log.text)
    memory = find_number(gpu[2], at_least=0.01) if gpu else None
    if gpu is None or memory is None or log.given_device:
        return devices_beside(log, n_ranks)
    is_node = n_ranks <= _EACH
    return [(rank * is_node, gpu[1], int(memory * _GIB)) for rank in range(n_ranks)]


def _configuration(log: Log, n_seen: int) -> tuple[dict[str, Any], int]:
    """The run's configuration, and its number of ranks.

    Args:
        n_seen: ranks up to the highest one that writes lines.

    Raises:
        ResultsError: the log does not name the batch, or too many ranks.
    """
    batch, mesh = _BATCH.search(log.text), _MESH.search(log.text)
    if batch is None:
        raise ResultsError(
            f"{log.path} has no line 'Trainer is initialized with local batch size ...': import it "
            "from its beginning"
        )
    local, of_all, accumulated, n_tokens = map(int, batch.groups())
    names = [name.strip(" '\"") for name in mesh[1].split(",")] if mesh else []
    sizes = [find_int(size, 1, _MOST_RANKS) or 1 for size in mesh[2].split(",")] if mesh else []
    n_replicas = max(1, of_all // max(1, local * accumulated))
    n_ranks = max(n_seen, prod(sizes) if mesh else n_gpus_named(log.path) or n_replicas)
    if n_ranks > _MOST_RANKS:
        raise ResultsError(f"{log.path} names {n_ranks} GPUs: {_MOST_RANKS} are the most")
    known: dict[str, Any] = {}
    if model := _MODEL.search(log.text):
        known["model"] = f"{model[1]} {model[2]}"
    applied = _DATA_PARALLEL.search(log.text)
    if len(sizes) > 1 or (sizes and not applied):
        known["strategy"] = ",".join(map("{}={}".format, names, sizes))
    elif applied:
        known["strategy"] = applied[1].lower()
    elif n_ranks == 1:
        known["strategy"] = "single"
    batches = {"global_batch": of_all, "batch_per_device": local, "accumulation": accumulated}
    return log.config(n_ranks, dataset="", sequence_length=n_tokens, **batches, **known), n_ranks


def _read(log: Log) -> list[ImportedRun]:
    by_rank: dict[int, list[TitanLine]] = {}
    for line in _lines(log.text):
        by_rank.setdefault(line.rank, []).append(line)
    if not by_rank:
        raise ResultsError(f"{log.path} has lines of ranks above {_MOST_RANKS - 1} alone")
    config, n_ranks = _configuration(log, 1 + max(by_rank))
    origin, end_s = extent_of([(line.at, 0.0) for lines in by_rank.values() for line in lines])
    skipped: list[tuple[int, str]] = []
    tokens = Sample(metric="tokens_per_sample", value=float(config["sequence_length"]))
    records: dict[int, list[Record]] = {}
    for rank, lines in sorted(by_rank.items()):
        spans = _spans(lines, origin, skipped)
        records[rank] = [tokens, *_samples(lines, origin), *spans]
        if not spans:
            raise ResultsError(
                f"{log.path} has no two metric lines of rank {rank} with times: log more steps"
            )
    log.skipped.extend(group(skipped))
    return [ImportedRun(log.name, config, _devices(log, n_ranks), records, origin, end_s)]


READER = LogReader(is_torchtitan_log, _read)

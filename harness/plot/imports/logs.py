"""Write imported logs as runs `imported-<name>/`; a new import replaces them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.record import Record, Sample, Span
from harness.domain.run import RankInfo, RunHeader, run_key
from harness.errors import ResultsError
from harness.measure.store import write_atomically, write_header
from harness.plot.imports.deepspeed_log import (
    StepLine,
    accumulation,
    ending,
    is_deepspeed_log,
    parse_deepspeed_log,
)
from harness.plot.imports.epoch_csv import EpochRow, is_epoch_csv, parse_epoch_csv
from harness.plot.imports.text import decode
from harness.units import parse_bytes

SUFFIXES = {".csv", ".log", ".txt"}
_MOST_REPEATS = 64
MAX_BYTES = 512 * 2**20
Problems = list[tuple[Path, str]]


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
    """GPU of a log that names none, and has no CSV of as many GPUs in the same directory."""
    device_memory: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """Memory of that GPU, such as 8GiB."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ImportFacts):
    """Turn per-epoch CSVs and DeepSpeed step lines into runs. Importing a file again replaces its
    runs. Facts that a log lacks come from its name (vit_b16_strong_2gpu.csv) and from these flags.
    """

    paths: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PATH ...", help_behavior_hint=""),
    ]
    """Log files, or directories of them."""
    into: Path = Path("results")
    """Directory of the runs."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Device of each rank: index on its host, kind, memory in bytes."""

    by_rank: tuple[tuple[int, str, int], ...]


def _logs(paths: Iterable[Path], problems: Problems) -> list[Path]:
    """Files to read: the given files, and files with a log's suffix in given directories."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.iterdir() if p.is_file() and p.suffix in SUFFIXES)
        elif path.is_file():
            found.append(path)
        else:
            problems.append((path, "does not exist"))
    return list(dict.fromkeys(found))


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_BYTES:
        raise ResultsError(f"{path} is larger than {MAX_BYTES // 2**20} MiB: import a part of it")
    return decode(path.read_bytes())


def _run_names(paths: Sequence[Path]) -> dict[Path, str]:
    """A directory name for each file; files of equal names are prefixed by their folder's."""
    stems = Counter(path.stem for path in paths)
    names = {}
    for path in paths:
        words = [path.stem] if stems[path.stem] == 1 else [path.resolve().parent.name, path.stem]
        names[path] = "imported-" + re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))
    return names


def _n_gpus_named(path: Path) -> int | None:
    match = re.search(r"(?<!\d)(\d{1,5})[ _-]?gpus?(?![a-z])", path.stem.lower(), re.ASCII)
    return int(match[1]) if match and int(match[1]) else None


def _origin(times: Iterable[tuple[datetime | None, float]]) -> datetime | None:
    """Start of the first interval, from ends and lengths."""
    return min((at - timedelta(seconds=length) for at, length in times if at), default=None)


def _seconds(at: datetime | None, origin: datetime | None) -> float | None:
    return (at - origin).total_seconds() if at and origin else None


def _cluster(devices: DeviceFacts) -> Cluster:
    """Place ranks with equal device indices on different nodes; others share one."""
    indices = [index for index, _, _ in devices.by_rank]
    is_shared = len(indices) > 1 and len(set(indices)) == len(indices)
    made = [
        Device(name=f"node{0 if is_shared else r}:{index}", kind=kind, memory_bytes=memory)
        for r, (index, kind, memory) in enumerate(devices.by_rank)
    ]
    groups = [made] if is_shared else [[device] for device in made]
    return Cluster(nodes=[Node(name=f"node{i}", devices=group) for i, group in enumerate(groups)])


def _ranks(devices: DeviceFacts, cluster: Cluster) -> list[RankInfo]:
    nodes = cluster.node_of()
    return [
        RankInfo(
            rank=rank,
            hostname=cluster.nodes[nodes[rank]].name,
            device=f"cuda:{index}",
            device_kind=kind,
            n_cores=0,
            memory_bytes=memory,
        )
        for rank, (index, kind, memory) in enumerate(devices.by_rank)
    ]


def _header(
    run_id: str,
    repeat: int,
    config: dict[str, Any],
    devices: DeviceFacts,
    start: datetime | None,
    duration_s: float | None,
) -> RunHeader:
    cluster = _cluster(devices)
    return RunHeader(
        run_id=run_id,
        workload="train",
        key=run_key("train", config, cluster),
        repeat=repeat,
        argv=[],
        config=config,
        cluster=cluster,
        ranks=_ranks(devices, cluster),
        versions={},
        commit="",
        start_utc=start.isoformat(timespec="seconds") if start else "",
        status="ok",
        duration_s=duration_s,
    )


def _config(path: Path, facts: ImportFacts, n_ranks: int, **more: Any) -> dict[str, Any]:
    return {
        "strategy": facts.strategy,
        "model": facts.model,
        "dataset": facts.dataset,
        "dtype": facts.dtype,
        "batch_per_device": facts.batch_per_device,
        "global_batch": facts.batch_per_device * n_ranks,
        **more,
        "source": path.name,
    }


def _write(into: Path, header: RunHeader, records: dict[int, list[Record]]) -> Path:
    """Write a run; records first, so that a header never exists without them."""
    run_dir = into / header.run_id
    run_dir.mkdir(parents=True, exist_ok=True)
    for rank, of_rank in records.items():
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in of_rank)
        write_atomically(run_dir / f"rank{rank}.jsonl", lines)
    names = {f"rank{rank}.jsonl" for rank in records}
    for file in run_dir.glob("rank*.jsonl"):
        if file.name not in names:
            file.unlink()
    write_header(run_dir, header)
    return run_dir


def _csv_devices(
    rows: Sequence[EpochRow], facts: ImportFacts, path: Path, n_ranks: int
) -> DeviceFacts:
    by_rank: dict[int, tuple[int, str, int]] = {}
    for row in rows:
        kind = row.device_kind or facts.device_kind
        memory = row.memory_total_bytes or 0
        if kind and memory > 0:
            by_rank.setdefault(row.rank, (row.device_id, kind, int(memory)))
    given = _given_device(facts)
    missing = set(range(n_ranks)) - {row.rank for row in rows}
    if len({device[1:] for device in by_rank.values()}) == 1:  # missing ranks have it too
        _, kind, memory = next(iter(by_rank.values()))
        are_indexed = all(index == rank for rank, (index, _, _) in by_rank.items())
        by_rank |= {rank: (rank if are_indexed else 0, kind, memory) for rank in missing}
    known = [by_rank.get(rank, given and (0, *given)) for rank in range(n_ranks)]
    if any(device is None for device in known):
        raise ResultsError(
            f"{path} does not name the GPU and memory of rank {known.index(None)}: "
            "give --device-kind and --device-memory"
        )
    return DeviceFacts(by_rank=tuple(device for device in known if device))


def _n_ranks(rows: Sequence[EpochRow], path: Path, problems: Problems) -> int:
    """Number of ranks, from the rows and the file's name; reports ranks without a line."""
    seen = {row.rank for row in rows}
    n_ranks = max(max(seen) + 1, _n_gpus_named(path) or 1)
    missing = sorted(set(range(n_ranks)) - seen)
    if missing:
        names = ", ".join(map(str, missing[:8])) + (" ..." if missing[8:] else "")
        problems.append((path, f"no line of rank {names} of {n_ranks}: the others are kept"))
    return n_ranks


def _given_device(facts: ImportFacts) -> tuple[str, int] | None:
    if not (facts.device_kind and facts.device_memory):
        return None
    return facts.device_kind, parse_bytes(facts.device_memory)


def _epoch_records(
    rows: Iterable[EpochRow], n_samples: float, origin: datetime | None, first: int
) -> list[Record]:
    records: list[Record] = []
    for row in sorted(rows, key=lambda row: row.epoch):
        time_s = _seconds(row.at, origin)
        step = row.epoch - first
        if not row.is_extra:
            records.append(Sample(metric="epoch_s", value=row.duration_s, step=step, time_s=time_s))
            records.append(Sample(metric="n_samples", value=n_samples, step=step))
        for metric, value in (
            ("device_utilization_percent", row.utilization_percent),
            ("device_temperature_c", row.temperature_c),
            ("memory_used_bytes", row.memory_used_bytes),
        ):
            if value is not None:
                labels: dict[str, Any] = {"device": f"cuda:{row.device_id}"}
                records.append(Sample(metric=metric, value=value, labels=labels, time_s=time_s))
    return records


def _share_records(steps: set[int], n_samples: float) -> list[Record]:
    """Samples of a rank without a line, because the job's samples count over all ranks."""
    return [Sample(metric="n_samples", value=n_samples, step=step) for step in sorted(steps)]


def _import_csv(
    path: Path, text: str, name: str, into: Path, facts: ImportFacts, problems: Problems
) -> list[Path]:
    rows, skipped = parse_epoch_csv(text, path)
    problems += [(path, reason) for reason in skipped]
    n_ranks = _n_ranks(rows, path, problems)
    devices = _csv_devices(rows, facts, path, n_ranks)
    first = min(1, min(row.epoch for row in rows))  # logs count from 0 or from 1
    scaling = "weak" if "weak" in path.stem.lower() else "strong"
    per_rank = facts.epoch_samples * (facts.weak_share if scaling == "weak" else 1 / n_ranks)
    config = _config(
        path, facts, n_ranks, scaling=scaling, samples_per_epoch=round(per_rank * n_ranks)
    )
    written = []
    n_repeats = 1 + max(row.occurrence for row in rows)
    if n_repeats > _MOST_REPEATS:
        raise ResultsError(
            f"{path} has an epoch of a rank {n_repeats} times: import at most {_MOST_REPEATS} "
            "trainings from one file"
        )
    for repeat in sorted({row.occurrence for row in rows}):
        of_repeat = [row for row in rows if row.occurrence == repeat]
        origin = _origin((row.at, row.duration_s) for row in of_repeat)
        ends = [s for row in of_repeat if (s := _seconds(row.at, origin)) is not None]
        records = {
            rank: _epoch_records((r for r in of_repeat if r.rank == rank), per_rank, origin, first)
            or _share_records({row.epoch - first for row in of_repeat}, per_rank)
            for rank in range(n_ranks)
        }
        run_id = name if repeat == 0 else f"{name}-repeat{repeat}"
        header = _header(run_id, repeat, config, devices, origin, max(ends, default=None))
        written.append(_write(into, header, records))
    return written


def _step_records(steps: Sequence[StepLine], origin: datetime | None) -> list[Record]:
    """Spans end at their line's time; without times they follow each other."""
    records: list[Record] = []
    reached_s = 0.0
    for index, line in enumerate(steps):
        end_s = _seconds(line.at, origin)
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


def _sibling_devices(path: Path, n_ranks: int, facts: ImportFacts) -> DeviceFacts:
    """GPUs of a log that names none: given, or from a CSV of as many in the same directory."""
    given = _given_device(facts)
    if given:
        return DeviceFacts(by_rank=tuple((0, *given) for _ in range(n_ranks)))
    for sibling in sorted(path.parent.glob("*.csv")):
        if sibling.is_file() and _n_gpus_named(sibling) == n_ranks:
            text = _read(sibling)
            if is_epoch_csv(text):
                rows = parse_epoch_csv(text, sibling)[0]
                if max(row.rank for row in rows) < n_ranks:
                    return _csv_devices(rows, facts, sibling, n_ranks)
    raise ResultsError(
        f"{path} does not name its GPUs and no CSV of {n_ranks} GPUs is in its directory: "
        "give --device-kind and --device-memory"
    )


def _import_deepspeed(
    path: Path, text: str, name: str, into: Path, facts: ImportFacts, problems: Problems
) -> list[Path]:
    steps, skipped = parse_deepspeed_log(text, path)
    problems += [(path, reason) for reason in skipped]
    if error := ending(text):
        problems.append((path, f"training ended with an error ({error}): its steps are kept"))
    by_rank: dict[int, list[StepLine]] = defaultdict(list)
    for line in steps:
        by_rank[line.rank].append(line)
    n_ranks = max(_n_gpus_named(path) or 1, max(by_rank) + 1)
    devices = _sibling_devices(path, n_ranks, facts)
    origin = _origin((line.at, line.step_s) for line in steps)
    ends = [s for line in steps if (s := _seconds(line.at, origin)) is not None]
    n_micro = accumulation(steps)
    config = _config(path, facts, n_ranks)
    if n_micro > 1:
        # A device trains its batch in each micro-step; all are one step of the optimizer.
        config |= {"accumulation": n_micro, "global_batch": config["global_batch"] * n_micro}
    header = _header(name, 0, config, devices, origin, max(ends, default=None))
    records = {rank: _step_records(lines, origin) for rank, lines in sorted(by_rank.items())}
    return [_write(into, header, records)]


def import_logs(
    paths: Iterable[Path], into: Path, facts: ImportFacts
) -> tuple[list[Path], Problems]:
    """Import files and directories; returns the written runs, and skipped files with reasons.

    An unusable file does not stop the others.
    """
    problems: Problems = []
    logs = _logs(paths, problems)
    names = _run_names(logs)
    written: list[Path] = []
    for path in logs:
        try:
            text = _read(path)
            is_log = is_deepspeed_log(text)
            if is_epoch_csv(text) or (path.suffix.lower() == ".csv" and not is_log):
                written += _import_csv(path, text, names[path], into, facts, problems)
            elif is_log:
                written += _import_deepspeed(path, text, names[path], into, facts, problems)
            else:
                remedy = ": harness.plan import --collectives reads nccl-tests"
                remedy = remedy if "busbw" in text else ""
                problems.append((path, f"neither a per-epoch CSV nor DeepSpeed step lines{remedy}"))
        except (ResultsError, OSError) as error:
            problems.append((path, str(error).removeprefix(f"{path} ")))
    return written, problems

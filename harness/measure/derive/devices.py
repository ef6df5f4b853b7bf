"""Rates of single devices, and of distributed products, from matmul records."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.domain.record import SHORTEST_S, Sample
from harness.domain.run import Headed, RankInfo
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import by_iteration
from harness.measure.statistics import Summary, known_median, summarize
from harness.measure.store import Run
from harness.measure.text import noise_texts

PeakKey = tuple[str, float, str]
"""Device kind, number of cores (CPU shares of different sizes are different kinds), dtype."""


@dataclass(frozen=True, kw_only=True)
class MatmulRow:
    """One product on one rank's device; rates are 2mnk / time.

    Attributes:
        flops_per_s: from the median time.
        max_flops_per_s: from the shortest time.
        error: largest relative error against the float64 reference, None when not verified.
    """

    rank: int
    hostname: str
    device_kind: str
    dtype: str
    m: int
    n: int
    k: int
    time: Summary
    flops_per_s: float
    max_flops_per_s: float
    peak_flops_per_s: float | None
    error: float | None

    @property
    def is_above_peak(self) -> bool:
        """Whether the rate exceeds the device's peak, so that the measurement must be wrong."""
        return self.peak_flops_per_s is not None and self.flops_per_s > self.peak_flops_per_s


@dataclass(frozen=True, kw_only=True)
class SummaRow:
    """One product distributed over the first `n_ranks` ranks.

    Attributes:
        time: summary of the maximum over ranks; other times are medians of the slowest rank.
        efficiency: aggregate rate over the sum of the ranks' matmul peaks; None if unknown.
    """

    scaling: str
    dtype: str
    m: int
    n: int
    k: int
    n_ranks: int
    time: Summary
    compute_s: float | None
    communication_s: float | None
    exposed_communication_s: float | None
    flops_per_s: float
    efficiency: float | None


def info_of(run: Headed, rank: int) -> RankInfo:
    """Host and device of a rank; an anonymous device if the header lacks the rank."""
    known = {info.rank: info for info in run.header.ranks}
    unknown = RankInfo(
        rank=rank, hostname=f"rank {rank}", device="", device_kind="", n_cores=0, memory_bytes=0
    )
    return known.get(rank, unknown)


def _by_labels(samples: Iterable[Sample], *names: str) -> dict[tuple[object, ...], list[Sample]]:
    groups: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[tuple(sample.labels[name] for name in names)].append(sample)
    return groups


def _positive(samples: Iterable[Sample]) -> list[float]:
    return [sample.value for sample in samples if sample.value >= SHORTEST_S]


def matmul_table(run: Run) -> list[MatmulRow]:
    """One row per local product of each rank, by dtype and size."""
    rows = []
    for rank, records in sorted(run.ranks.items()):
        info = info_of(run, rank)
        errors = _by_labels(samples_of(records, "matmul_error"), "m", "n", "k", "dtype")
        groups = _by_labels(samples_of(records, "matmul_s"), "m", "n", "k", "dtype")
        for labels, samples in groups.items():
            times = _positive(samples)
            if not times:
                continue
            time, dtype = summarize(times), str(labels[3])
            m, n, k = (int(str(size)) for size in labels[:3])
            rows.append(
                MatmulRow(
                    rank=rank,
                    hostname=info.hostname,
                    device_kind=info.device_kind,
                    dtype=dtype,
                    m=m,
                    n=n,
                    k=k,
                    time=time,
                    flops_per_s=2 * m * n * k / time.median,
                    max_flops_per_s=2 * m * n * k / time.min,
                    peak_flops_per_s=info.peak_flops_per_s.get(dtype),
                    error=max((sample.value for sample in errors.get(labels, [])), default=None),
                )
            )
    return sorted(rows, key=lambda row: (row.rank, row.dtype, row.m * row.n * row.k))


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """STREAM's copy or triad on one rank's device; rates in bytes/s, reads and writes added.

    Attributes:
        n_bytes: size of one array.
        bytes_per_s: from the median time.
    """

    rank: int
    hostname: str
    device_kind: str
    kernel: str
    n_bytes: int
    time: Summary
    bytes_per_s: float


MEMORY_KERNELS = {"copy": ("memory_copy_s", 2), "triad": ("memory_triad_s", 3)}
"""Metric of each kernel, and the number of arrays that it reads or writes."""


def memory_table(run: Run) -> list[MemoryRow]:
    """Memory bandwidth of every rank's device.

    Source: McCalpin, STREAM: traffic is two arrays for a copy and three for a triad.
    """
    rows = []
    for rank, records in sorted(run.ranks.items()):
        info = info_of(run, rank)
        for kernel, (metric, n_arrays) in MEMORY_KERNELS.items():
            for (n_bytes,), samples in _by_labels(samples_of(records, metric), "n_bytes").items():
                times = _positive(samples)
                if times:
                    time = summarize(times)
                    traffic = n_arrays * int(str(n_bytes))
                    rows.append(
                        MemoryRow(
                            rank=rank,
                            hostname=info.hostname,
                            device_kind=info.device_kind,
                            kernel=kernel,
                            n_bytes=int(str(n_bytes)),
                            time=time,
                            bytes_per_s=traffic / time.median,
                        )
                    )
    return rows


def matmul_peaks(runs: Iterable[Run]) -> dict[PeakKey, float]:
    """Best measured FLOP/s over sizes of each kind of device and dtype, from median times.

    The peak of a kind is the median over its ranks and runs, so that one outlier does not define
    it. Runs that are not ok do not count.
    """
    return peaks_of((run, matmul_table(run)) for run in runs)


def peaks_of(tables: Iterable[tuple[Headed, Iterable[MatmulRow]]]) -> dict[PeakKey, float]:
    """As `matmul_peaks`, from the table of each run."""
    best: dict[PeakKey, list[float]] = defaultdict(list)
    for run, rows in tables:
        if run.header.status != "ok":
            continue
        by_rank: dict[tuple[int, str], float] = {}
        for row in rows:
            at = (row.rank, row.dtype)
            by_rank[at] = max(by_rank.get(at, 0.0), row.flops_per_s)
        for (rank, dtype), rate in by_rank.items():
            info = info_of(run, rank)
            best[info.device_kind, info.n_cores, dtype].append(rate)
    return {key: summarize(rates).median for key, rates in best.items()}


def sum_of_peaks(
    infos: Iterable[RankInfo], dtype: str, peaks: dict[PeakKey, float]
) -> float | None:
    """Sum of the measured peaks of all devices; None if one was not measured."""
    rates = [peaks.get((info.device_kind, info.n_cores, dtype)) for info in infos]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None


def best_products(rows: Iterable[MatmulRow]) -> list[MatmulRow]:
    """The product with the best rate of each device and dtype."""
    best: dict[tuple[str, int], MatmulRow] = {}
    for row in rows:
        known = best.setdefault((row.dtype, row.rank), row)
        best[row.dtype, row.rank] = max(known, row, key=lambda one: one.flops_per_s)
    return [row for _, row in sorted(best.items())]


def product_noise(
    products: Iterable[MatmulRow], memory: Iterable[MemoryRow], distributed: Iterable[SummaRow]
) -> list[str]:
    """A line where samples vary, of the products that the tables show."""
    return noise_texts(
        {
            "products": [
                (f"rank {row.rank} {row.hostname} {row.dtype} n = {row.n}", row.time)
                for row in best_products(products)
            ],
            "memory bandwidths": [
                (f"rank {row.rank} {row.hostname} {row.kernel}", row.time) for row in memory
            ],
            "distributed products": [
                (f"{row.scaling} {row.dtype} n = {row.n} on {row.n_ranks} ranks", row.time)
                for row in distributed
            ],
        }
    )


def low_peak_warnings(rows: Iterable[SummaRow]) -> list[str]:
    """One line if products exceed their devices' measured peaks; names the highest."""
    every = list(rows)
    above = [row for row in every if row.efficiency is not None and row.efficiency > 1]
    if not above:
        return []
    most = max(above, key=lambda row: row.efficiency or 0.0)
    return [
        f"{len(above)} of {len(every)} distributed products ran faster than the sum of their "
        f"devices' matmul peaks (most: {most.efficiency:.0%}, n = {most.n} {most.dtype} on "
        f"{most.n_ranks}): these peaks are too low, measure them again"
    ]


SUMMA_LABELS = ("scaling", "dtype", "m", "n", "k")
_SUMMA_PARTS = ("compute_s", "communication_s", "exposed_communication_s")


def summa_table(run: Run, peaks: dict[PeakKey, float] | None = None) -> list[SummaRow]:
    """One row per distributed product; peaks default to those measured in this run."""

    def product_of(sample: Sample) -> tuple[object, ...]:
        n_ranks = sample.labels.get("n_ranks", len(run.header.ranks) or len(run.ranks))
        return (*(sample.labels[name] for name in SUMMA_LABELS), n_ranks)

    peaks = matmul_peaks([run]) if peaks is None else peaks
    times = by_iteration(run, "summa_s", product_of)
    parts = {name: by_iteration(run, f"summa_{name}", product_of) for name in _SUMMA_PARTS}
    rows = []
    for labels, iterations in times.items():
        # The slowest rank's values, so that the parts sum to its time.
        ranks = {at: max(own, key=own.__getitem__) for at, own in iterations.items()}
        slowest = {at: iterations[at][rank] for at, rank in ranks.items()}
        timed = {at: time_s for at, time_s in slowest.items() if time_s >= SHORTEST_S}
        if timed:
            of_parts = {
                name: known_median(found[labels].get(at, {}).get(ranks[at]) for at in timed)
                for name, found in parts.items()
            }
            rows.append(_summa_row(labels, summarize(list(timed.values())), of_parts))
    rows.sort(key=lambda row: (row.scaling, row.dtype, row.m * row.n * row.k, row.n_ranks))
    return with_efficiency(rows, run.header.ranks, peaks)


def with_efficiency(
    rows: Iterable[SummaRow], ranks: Sequence[RankInfo], peaks: dict[PeakKey, float]
) -> list[SummaRow]:
    """Add each row's efficiency, if the peaks of all its ranks are known."""
    sums = [(row, sum_of_peaks(ranks[: row.n_ranks], row.dtype, peaks)) for row in rows]
    return [replace(row, efficiency=row.flops_per_s / peak if peak else None) for row, peak in sums]


def _summa_row(
    labels: tuple[object, ...], time: Summary, parts: Mapping[str, float | None]
) -> SummaRow:
    m, n, k, n_ranks = (int(str(number)) for number in labels[2:])
    return SummaRow(
        scaling=str(labels[0]),
        dtype=str(labels[1]),
        m=m,
        n=n,
        k=k,
        n_ranks=n_ranks,
        time=time,
        flops_per_s=2 * m * n * k / time.median,
        efficiency=None,
        **parts,
    )


def unpublished_peaks(runs: Iterable[Headed]) -> list[str]:
    """A line for each kind of GPU without a published peak, because its cells stay empty."""
    infos = [info for run in runs for info in run.header.ranks]
    kinds = {i.device_kind for i in infos if i.device.startswith("cuda") and not i.peak_flops_per_s}
    return [
        f"no published peak of {kind!r} is known, so its MFU and share of peak stay empty; the MFU "
        "of measured peak needs none (harness/runtime/devices/peaks.py lists the known devices)"
        for kind in sorted(kinds)
    ]

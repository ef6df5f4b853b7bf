"""Print docs/readings.md: the latest reading of each comparison in benchmarks/figures/.

    python benchmarks/readings.py >docs/readings.md

Lines of a file are in order of time, so the last line of a name is the latest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

FIGURES = Path(__file__).resolve().parent / "figures"
Row = dict[str, Any]

_HEAD = """# Readings

Made by `python benchmarks/readings.py >docs/readings.md` from
[benchmarks/figures](../benchmarks/figures): the latest reading of each comparison.
[Benchmarks](../benchmarks/README.md) says how to take them; [faults](faults.md) has those of
`faults.py`. Each line of the data names its command, machine and commit. But for those of one GPU,
the machines have two cores (AMD EPYC or Intel Xeon, Linux 6.18). Virtual clusters have two to five
nodes with 0.15 to 0.36 of a core each.
"""
_GPU = """
## One GPU

One H200 or H100 with 16 cores, torch 2.11; by parts of `gpu.sh`. A step of few samples waits for
the host, so it takes longer than its operators. On the H200 the executor's steps of ResNet-50 took
longer, because the host copied synthetic samples, and GPT-2 was predicted by a step alone on the
device; both were mended before the readings of the H100. The law of steps that wait for the host
and the model of memory were made from those of the H200: before, GPT-2's peak was predicted at
7.66 GiB.

"""
_COMPARISONS = """
## Comparisons

The interval is that of the median at 99 %, or the range of fewer than 8 pairs.

"""
_CELLS = """
## Cells

Strategies of one model on one virtual cluster, trained in turn
([prediction](design/prediction.md)): the step of the best strategy by hand over the searched one,
the step of ddp over it, rank correlation of predicted and measured steps, regret of the predicted
choice, and median |error| of the predictions.

"""
_PUBLISHED = """
## Published steps of GPU clusters

[Validate](validate.md) says what each set calibrates. Errors are of judged points that ran; the
source's own predictor stands beside.

"""
_COUNTS = """
## Counts

"""


def read(name: str) -> list[Row]:
    """The rows of a file of figures, by its name without suffix."""
    lines = (FIGURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def latest(rows: Iterable[Row], key: str) -> list[Row]:
    """The last row of each value of `key`, in the order in which the values first appear."""
    return list({row[key]: row for row in rows if key in row}.values())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars within a cell become slashes."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def comparisons() -> Iterator[list[str]]:
    """One row for each comparison that has a ratio, by file."""
    for path in sorted(FIGURES.glob("*.jsonl")):
        for row in latest((row for row in read(path.stem) if "ratio" in row), "name"):
            interval = f"{row['low']:.4g} to {row['high']:.4g} ({row['n_pairs']})"
            interval = "" if row["low"] == row["high"] else interval
            yield [path.stem, row["name"], f"{row['ratio']:.4g}", interval, row["commit"][:7]]


def cells() -> Iterator[list[str]]:
    """One row for each cell of searched.py."""
    for row in sorted(latest(read("searched"), "cell"), key=lambda row: str(row["cell"])):
        errors = [abs(s["error"]) for s in row["strategies"].values() if s.get("error") is not None]
        yield [
            row["cell"],
            f"{row['gain']:.2f} ({row['gain_low']:.2f} to {row['gain_high']:.2f})",
            row["best_hand_chosen"],
            f"{row['over_ddp']:.2f}",
            f"{row['rank_correlation']:.2f}",
            f"{row['regret']:.1%}",
            f"{median(errors):.1%}",
            row["commit"][:7],
        ]


def counts() -> Iterator[list[str]]:
    """One row for each program that counts cases."""
    kinds = {
        "": "",
        "--device nccl_rules": " on CPUs under NCCL's rules",
        "--shard-state parameters": " with sharded parameters",
        "--series programs": " of drawn models",
    }
    for words, kind in kinds.items():
        equivalence = [
            row
            for row in read("executor_equivalence")
            if words == next((known for known in kinds if known and known in row["command"]), "")
        ]
        last = [row for row in equivalence if row["commit"] == equivalence[-1]["commit"]]
        n_equal, n_cases = (sum(row[key] for row in last) for key in ("n_equal", "n_cases"))
        counted = f"random strategies{kind} equal to one device"
        yield ["executor_equivalence", counted, f"{n_equal} of {n_cases}"]
    for row in latest(read("change_equivalence"), "command"):
        kind = ", with frozen layers," if row["n_freezing"] else ""
        kind += " on CPUs under NCCL's rules" if "nccl_rules" in row["command"] else ""
        counted = f"trainings with {row['n_changes']} changes of strategy{kind} equal to one device"
        yield ["change_equivalence", counted, f"{row['n_equal']} of {row['n_cases']}"]
    readers = read("fuzz_readers")
    n_escaped, n = (sum(row[key] for row in readers) for key in ("n_escaped", "n"))
    counted = f"mutations that escape one of {len(readers)} readers"
    yield ["fuzz_readers", counted, f"{n_escaped} of {n}"]
    status = Counter(row["status"] for row in read("model_zoo") if "status" in row)
    counted = "models with one construct each, and models of libraries, by strategy"
    yield ["model_zoo", counted, ", ".join(f"{n} {name}" for name, n in status.most_common())]
    scale = read("plot_scale")[-1]
    counted = f"figures of {scale['n_runs']} runs: processor time, peak of memory"
    reading = f"{scale['cpu_s']:.0f} s, {scale['peak_bytes'] / 1e9:.2f} GB"
    yield ["plot_scale", counted, reading]


def gpu() -> Iterator[list[str]]:
    """One row for each reading of a GPU."""
    rows = {(_device(row), row["name"]): row for row in read("gpu")}
    for row in rows.values():
        interval = f"{row['low']:.4g} to {row['high']:.4g}" if "low" in row else ""
        predicted = f"{row['predicted']:.4g}" if "predicted" in row else ""
        value = f"{row['value']:.4g} {row['unit']}".strip()
        yield [_device(row), row["name"], value, interval, predicted, row["commit"]]


def _device(row: Row) -> str:
    """The GPU without its vendor and memory: H200."""
    return str(row["machine"]).split(",")[0].split()[1]


def published() -> Iterator[list[str]]:
    """One row for each published set, and for each of its parts."""
    for row in latest(read("validate"), "set"):
        for one in (row, *row.get("parts", ())):
            keys = ("median_error", "p90_error", "spearman", "regret", "source_median_error")
            shares = [one.get(key) for key in keys]
            words = ["" if share is None else f"{share:.1%}" for share in shares]
            words[2] = "" if one["spearman"] is None else f"{one['spearman']:.3f}"
            failed = f"{one['n_failed_called']} of {one['n_failed']}" if one["n_failed"] else ""
            name = f"{row['set']}, {one['part']}" if "part" in one else one["set"]
            n_points, n_judged = str(one.get("n_points", "")), str(one["n_expressed"])
            yield [name, n_points, n_judged, *words, failed, row["commit"]]


def page() -> str:
    """The text of docs/readings.md."""
    return "".join(
        [
            _HEAD,
            _COMPARISONS,
            table(["file", "comparison", "ratio", "interval (pairs)", "commit"], comparisons()),
            _GPU,
            table(["device", "reading", "value", "interval", "predicted", "commit"], gpu()),
            _CELLS,
            table(
                ["cell", "best by hand / searched", "best by hand", "ddp / searched", "order",
                 "regret", "error", "commit"],
                cells(),
            ),
            _PUBLISHED,
            table(
                ["set", "points", "judged", "median error", "p90", "order", "regret", "source's",
                 "failures called", "commit"],
                published(),
            ),
            _COUNTS,
            table(["file", "counted", "reading"], counts()),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    print(page(), end="")

"""Compare trainings that freeze layers: what shrinking, replicating and caching add.

    python benchmarks/elastic.py --work WORK                both bandwidths, 5 repeats; as root
    python benchmarks/elastic.py --work WORK --quick --json two repeats on slow links
    python benchmarks/elastic.py --work WORK --summary      of finished runs

The ablation of PipeTransformer (He et al., ICML 2021, figure 9) on a virtual cluster of five nodes:
a vision transformer of eight layers, which has been trained on scikit-learn's digits for some
epochs, is tuned on by a pipeline, in random order of the variants within each repeat.

    none                   all layers are trained to the end
    freeze                 half of the trained layers more is frozen after each epoch
    shrink and cache       the search plans the frozen model anew, without replicas; frozen outputs
                           are kept
    shrink and replicate   the search plans any strategy; nothing is kept
    all                    the search plans any strategy; frozen outputs are kept

A comparison's ratio is the time of `none` over that of the variant, in the same repeat: for the
same epochs, and until the held-out accuracy that every run reaches. Changes of strategy count,
evaluation does not. WORK keeps all runs, so that a second call measures only what is missing.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from comparison import compare
from searched import Cluster
from searched_cells import MODELS, Cell, Place

from harness.measure.derive.spans import samples_of
from harness.measure.rank_records import read_records
from harness.measure.statistics import verdict
from harness.measure.store import read_header

_CPU = 0.34  # of a core per node; the rest of two is for everything else
_LEARNING = ("--data", "digits", "--learning-rate", "0.001", "--warm-up", "0")
_LEARNING += ("--no-sync-steps", "0", "--engine", "executor", "--strategy", "pipeline")
_FREEZE = {"freeze": "schedule"}
# Flags of training, as a run's configuration has them.
VARIANTS: dict[str, dict[str, str]] = {
    "none": {},
    "freeze": _FREEZE,
    "shrink and cache": {**_FREEZE, "shrink": "search", "cache": "on"},
    "shrink and replicate": {**_FREEZE, "shrink": "search", "replicate": "True"},
    "all": {**_FREEZE, "shrink": "search", "replicate": "True", "cache": "on"},
}
_OFF = {"freeze": "none", "shrink": "none", "replicate": "False", "cache": "off"}


@dataclass(frozen=True, kw_only=True)
class Options:
    work: Path = Path("/tmp/elastic")
    """Directory of all runs."""
    bandwidths: tuple[str, ...] = ("1gbit", "100mbit")
    """Of the nodes' links."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """The variants; none is the baseline."""
    start_epochs: int = 12
    """Epochs in which a pipeline trains the model before."""
    epochs: int = 8
    """Epochs of a run."""
    alpha: float = 1 / 2
    """a of the schedule of freezing."""
    repeats: int = 5
    """Runs of each variant."""
    quick: bool = False
    """Two repeats on the slow links only, in less than 20 minutes."""
    summary: bool = False
    """Judge finished runs, without measuring."""
    figure: Path | None = None
    """Draw accuracy over time into this file."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object per comparison."""


class Trained(NamedTuple):
    """One run: seconds from its first step to the end of each epoch, and the accuracy there."""

    ends_s: list[float]
    accuracies: list[float]
    changes: list[str]

    def time_to(self, accuracy: float) -> float:
        """Seconds until an accuracy is reached."""
        pairs = zip(self.ends_s, self.accuracies, strict=True)
        return next(end_s for end_s, found in pairs if found >= accuracy)


Runs = dict[str, list[Trained]]  # by variant, in the order of the repeats


def read_run(path: Path) -> Trained:
    """Read a run; an epoch ends with its last rank, because a rank may idle under a strategy."""
    n_ranks = len(read_header(path).ranks)
    ranks = [read_records(path / f"rank{rank}.jsonl", n_ranks)[0] for rank in range(n_ranks)]
    epochs = [[s.value for s in samples_of(records, "epoch_s")] for records in ranks]
    return Trained(
        list(accumulate(map(max, zip(*epochs, strict=True)))),
        [sample.value for sample in samples_of(ranks[0], "accuracy")],
        [f"{s.step}: {s.labels['after']}" for s in samples_of(ranks[0], "change_s")],
    )


def results_of(cell: Cell, options: Options) -> Path:
    return options.work.resolve() / cell.place.name


def measure(cell: Cell, cluster: Cluster, options: Options) -> None:
    """Train every variant as often as asked, in one launch, unless WORK has the run."""
    shared = ("--results", str(results_of(cell, options)), "--resume")
    train = ("train", *cell.model.workload_flags, *_LEARNING, *shared)
    links = ("links", "--transport", "torch", "--operations", "all_reduce", *shared)
    cluster.build(cell)
    state = options.work.resolve() / f"start-{options.start_epochs}"
    if not state.exists():
        words = ("--epochs", str(options.start_epochs), "--save-sharded")
        cluster.start(cell, "./entry.sh", *links, "+", *train, *words)
        state.symlink_to(max(results_of(cell, options).glob("*-train-*/state")))
    rng, words = random.Random(0), [*links]
    for repeat in range(options.repeats):
        for name in rng.sample(options.variants, len(options.variants)):
            words += ["+", *train, "--evaluate", "--load-state", str(state.resolve())]
            words += ["--epochs", str(options.epochs), "--seed", str(1 + repeat)]
            words += _flags(name, options)
    cluster.start(cell, "./entry.sh", *words)


def _flags(name: str, options: Options) -> list[str]:
    """The words of a variant on the command line."""
    flags = VARIANTS[name]
    words = ["--freeze-alpha", str(options.alpha)] if "freeze" in flags else []
    for key, value in flags.items():
        words += [f"--{key}", *([] if value == "True" else [value])]
    return words + (["--search-seconds", "5"] if "shrink" in flags else [])


def read_runs(cell: Cell, options: Options) -> Runs:
    """The runs of all variants in as many repeats as all have, in their order.

    Raises:
        SystemExit: there is no run of a variant; names the last that failed.
    """
    found: dict[str, dict[int, Path]] = {name: {} for name in options.variants}
    failed = ""
    for path in sorted(results_of(cell, options).glob("*-train-*")):
        header = read_header(path)
        config = header.config
        own = {key: str(config[key]) for key in _OFF}
        has_alpha = config["freeze"] == "none" or config["freeze_alpha"] == options.alpha
        if config["epochs"] != options.epochs or not has_alpha:
            continue
        if header.status != "ok":
            failed = f"{path}: {header.status}: {header.reason}"
            continue
        for name in options.variants:
            if own == _OFF | VARIANTS[name]:
                found[name][int(config["seed"])] = path
    seeds = set(range(1, 1 + options.repeats)).intersection(*found.values())
    if not seeds:
        raise SystemExit(failed or "no variant was trained: run without --summary")
    return {name: [read_run(own[s]) for s in sorted(seeds)] for name, own in found.items()}


def judge(cell: Cell, runs: Runs) -> list[dict[str, Any]]:
    """The comparisons of a cluster."""
    bandwidth = cell.place.bandwidth
    target = min(max(run.accuracies) for own in runs.values() for run in own)
    place = f"{len(cell.place.cpu)} nodes of {cell.place.cpu[0]} cores, {bandwidth}"
    lines: list[dict[str, Any]] = []
    for name in [name for name in runs if name != "none"]:
        for until in ("epochs", "accuracy"):
            without, having = (
                [run.ends_s[-1] if until == "epochs" else run.time_to(target) for run in runs[one]]
                for one in ("none", name)
            )
            words = f"to {target:.3f}" if until == "accuracy" else f"{len(runs[name][0].ends_s)}"
            lines.append(
                compare(f"{name}, {until} {words}, {bandwidth}", without, having, place=place)
                | {
                    "variant": name,
                    "until": until,
                    "bandwidth": bandwidth,
                    "seconds_without": statistics.median(without),
                    "seconds_with": statistics.median(having),
                    "verdict": verdict(having, without).outcome,
                    "accuracy_without": _spread([run.accuracies[-1] for run in runs["none"]]),
                    "accuracy_with": _spread([run.accuracies[-1] for run in runs[name]]),
                    "changes": runs[name][0].changes,
                }
            )
    return lines


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def text(lines: list[dict[str, Any]]) -> str:
    """A table of the comparisons."""
    head = f"{'variant':22}{'links':9}{'until':10}{'none':>8}{'with':>8}{'ratio':>7}  range"
    rows = [
        f"{line['variant']:22}{line['bandwidth']:9}{line['until']:10}"
        f"{line['seconds_without']:7.1f}s{line['seconds_with']:7.1f}s{line['ratio']:7.2f}  "
        f"{line['low']:.2f} to {line['high']:.2f} ({line['n_pairs']}), {line['verdict']}, accuracy "
        f"{line['accuracy_without']['median']:.3f} to {line['accuracy_with']['median']:.3f}"
        for line in lines
    ]
    return "\n".join([head, *rows])


def draw(found: dict[str, Runs], path: Path) -> None:
    """Draw accuracy over time, one panel per bandwidth and one line per run."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(5 * len(found), 4), squeeze=False)
    for panel, (bandwidth, runs) in zip(panels[0], found.items(), strict=True):
        for number, (name, own) in enumerate(runs.items()):
            for k, run in enumerate(own):
                label = name if k == 0 else None
                panel.plot(run.ends_s, run.accuracies, f"C{number}.-", label=label, linewidth=1)
        panel.set(title=bandwidth, xlabel="seconds of training", ylabel="held-out accuracy")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(options: Options) -> None:
    if options.quick:
        options = replace(options, bandwidths=("100mbit",), repeats=2)
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        raise SystemExit(f"there is no variant {unknown[0]}: choose from {', '.join(VARIANTS)}")
    options.work.mkdir(parents=True, exist_ok=True)
    cells = [
        Cell(model=MODELS["deep_vit"], place=Place(cpu=(_CPU,) * 5, bandwidth=bandwidth))
        for bandwidth in options.bandwidths
    ]
    lines: list[dict[str, Any]] = []
    found: dict[str, Runs] = {}
    with Cluster("elastic") as cluster:
        for cell in cells:
            if not options.summary:
                measure(cell, cluster, options)
            found[cell.place.bandwidth] = read_runs(cell, options)
            lines += judge(cell, found[cell.place.bandwidth])
    if options.figure is not None:
        draw(found, options.figure)
    print("\n".join(map(json.dumps, lines)) if options.as_json else text(lines), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

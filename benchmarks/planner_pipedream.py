"""Compare plans by PipeDream's formula with PipeDream's optimizer: speed-up, CPU time, memory.

    python benchmarks/planner_pipedream.py [--profiles DIR] [--repeats 5] [--quick] [--json]
    python benchmarks/planner_pipedream.py --pipedream CHECKOUT    also times its optimizer, in turn

Every search runs in a separate process, by a user's command line. CPU seconds are the median of
`search_cpu_s` (docs/plan.md) over the repeats. PipeDream's are those of its optimizer alone: with a
clone of its repository they are measured in turn with ours, else taken from an earlier measurement
on one core of the same kind of machine, perhaps of another speed. "bound" is the target: a tenth of
PipeDream's CPU seconds if it takes more than one, else 10 s and 1 GiB for inception_v3 and 60 s and
2 GiB for the large graphs, which PipeDream cannot plan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from comparison import compare_extremes
from planner_graphs import GRAPHS

from harness.measure.text import table

PROFILES = Path(__file__).parents[2] / "shared/data/pipedream_profiles"
OPTIMIZER = "optimizer/optimizer_graph_hierarchical.py"  # in a clone of PipeDream
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """Devices and bandwidths, as flags."""

    topology: str
    bandwidth: str

    def __str__(self) -> str:
        return f"{self.topology}, {self.bandwidth}"


SETTINGS = [
    Setting("4", "1e9"),
    Setting("4", "1e10"),
    Setting("16", "5e9"),
    Setting("4x4", "1e10,1.25e9"),
]


@dataclass(frozen=True)
class Listed:
    """Results of PipeDream's optimizer: speed-up in its known digits, CPU seconds if over one."""

    speedup: float | None
    cpu_s: float | None = None

    def n_repeats(self, most: int) -> int:
        """Number of repeats that take about ten seconds, at least one."""
        return 0 if self.cpu_s is None else max(1, min(most, int(10 / self.cpu_s)))


LISTED = {
    "alexnet": [Listed(2.49), Listed(3.85), Listed(14.28), Listed(5.65)],
    "vgg16": [Listed(3.27), Listed(3.95), Listed(15.17), Listed(10.02)],
    "resnet18": [Listed(2.60), Listed(3.94), Listed(14.69), Listed(11.06)],
    "resnet50": [Listed(2.72), Listed(3.98), Listed(14.52, 3.6), Listed(10.26, 23)],
    "densenet121": [Listed(3.62, 1.3), Listed(3.98, 1.3), Listed(15.74, 12), Listed(None)],
    "gnmt": [Listed(3.46), Listed(3.46), Listed(8.07), Listed(8.07)],
    "inception_v3": [Listed(3.03, 12), Listed(3.95, 12), Listed(14.90, 95), Listed(None)],
}


def plan(profile: Path, setting: Setting) -> dict[str, float]:
    """Run one search as a user does."""
    command = [sys.executable, "-m", "harness.plan", "search", "--profile", str(profile)]
    command += ["--topology", setting.topology, "--bandwidth", setting.bandwidth]
    done = subprocess.run(
        [*command, "--cost", "pipedream", "--json"], capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def theirs(checkout: Path, profile: Path, setting: Setting) -> float:
    """CPU seconds of PipeDream's optimizer, run in a separate process."""
    flags = ["--machines", *setting.topology.split("x"), "--bandwidth"]
    flags += setting.bandwidth.split(",")
    if profile.stem == "inception_v3":  # does not end without --compress
        flags.append("--compress")
    script = Path(__file__).with_name("pipedream_theirs.py")
    command = [sys.executable, str(script), str(checkout), str(profile), *flags]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@dataclass(frozen=True)
class Row:
    """One profile on one setting."""

    name: str
    setting: Setting
    listed: Listed
    speedup: float
    cpu_s: list[float]
    peak_bytes: float
    theirs_s: list[float]

    @property
    def pipedream_cpu_s(self) -> float | None:
        """Measured in this run, or listed."""
        return statistics.median(self.theirs_s) if self.theirs_s else self.listed.cpu_s

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def bound_s(self) -> float:
        if self.pipedream_cpu_s is not None:
            return self.pipedream_cpu_s / 10
        return 10.0 if self.name == "inception_v3" else 60.0

    @property
    def is_met(self) -> bool:
        # Listed speed-ups have two digits, so ours is rounded before the comparison.
        fast = self.listed.speedup is None or round(self.speedup, 2) >= self.listed.speedup
        most_bytes = GIB if self.name == "inception_v3" else 2 * GIB
        return fast and self.median_cpu_s <= self.bound_s and self.peak_bytes < most_bytes

    def cells(self) -> list[str]:
        listed = self.listed
        return [
            self.name,
            str(self.setting),
            "-" if listed.speedup is None else f"{listed.speedup:.2f}",
            f"{self.speedup:.2f}",
            "-" if self.pipedream_cpu_s is None else f"{self.pipedream_cpu_s:.3g}",
            f"{self.median_cpu_s:.4f}",
            f"{self.bound_s:.3g}",
            f"{self.peak_bytes / 2**20:.0f}",
            "yes" if self.is_met else "NO",
        ]


HEADER = ["profile", "devices, bytes/s", "PipeDream", "ours", "its CPU s", "our CPU s",
          "bound", "peak MiB", "met"]  # fmt: skip


def measure(
    name: str,
    path: Path,
    setting: Setting,
    listed: Listed,
    repeats: int,
    checkout: Path | None = None,
) -> Row:
    """Measure ours and, if it takes over a second, PipeDream's, in turn."""
    results, theirs_s = [], []
    n_theirs = 0 if checkout is None else listed.n_repeats(repeats)
    for k in range(repeats):
        results.append(plan(path, setting))
        if checkout is not None and k < n_theirs:
            theirs_s.append(theirs(checkout, path, setting))
    return Row(
        name=name,
        setting=setting,
        listed=listed,
        speedup=results[0]["speedup_over_single"],
        cpu_s=[result["search_cpu_s"] for result in results],
        peak_bytes=max(result["peak_rss_bytes"] for result in results),
        theirs_s=theirs_s,
    )


def comparisons(row: Row) -> list[dict[str, object]]:
    """Ratios of speed-up, ours over PipeDream's, and of CPU seconds, PipeDream's over ours."""
    found: list[dict[str, object]] = []
    where = f"pipedream {row.name} on {row.setting}"
    if row.listed.speedup is not None:
        name = f"{where}, speed-up, ours over PipeDream's"
        found.append(compare_extremes(name, [row.speedup / row.listed.speedup]))
    if row.pipedream_cpu_s is not None:
        # Pair each measurement of ours with the adjacent one of theirs, if any.
        their_s = [*row.theirs_s, *[row.pipedream_cpu_s] * len(row.cpu_s)]
        ratios = [a / b for a, b in zip(their_s, row.cpu_s, strict=False)]
        name = f"{where}, CPU time, PipeDream's over ours"
        theirs = "measured" if row.theirs_s else "listed"
        found.append(compare_extremes(name, ratios, theirs=theirs))
    return found


def run(profiles: Path, repeats: int, *, quick: bool, checkout: Path | None = None) -> list[Row]:
    """All rows: published profiles if available, then generated graphs."""
    rows = []
    for name, listed in LISTED.items():
        path = profiles / f"{name}.txt"
        if not path.exists():
            print(f"skipped {name}: {path} is not there", file=sys.stderr)
            continue
        for setting, each in zip(SETTINGS, listed, strict=True):
            rows.append(measure(name, path, setting, each, repeats, checkout))
    with tempfile.TemporaryDirectory() as folder:
        for name, generate in list(GRAPHS.items())[: 1 if quick else None]:
            path = Path(folder) / "graph.txt"
            path.write_text(generate())
            rows += [measure(name, path, s, Listed(None), 1) for s in SETTINGS[1:]]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of graph.txt files")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat, one generated graph")
    parser.add_argument("--pipedream", type=Path, help="a clone of PipeDream, to time it too")
    parser.add_argument("--json", action="store_true", help="one object per comparison")
    args = parser.parse_args()
    if args.pipedream is not None and not (args.pipedream / OPTIMIZER).is_file():
        parser.error(
            f"--pipedream {args.pipedream} holds no {OPTIMIZER}: give a clone of PipeDream"
        )
    repeats = 1 if args.quick else args.repeats
    rows = run(args.profiles, repeats, quick=args.quick, checkout=args.pipedream)
    out = sys.stderr if args.json else sys.stdout
    print("\n".join(table(HEADER, [row.cells() for row in rows])), file=out)
    print(f"{sum(row.is_met for row in rows)} of {len(rows)} met", file=out)
    if args.json:
        for row in rows:
            for comparison in comparisons(row):
                print(json.dumps(comparison))


if __name__ == "__main__":
    main()

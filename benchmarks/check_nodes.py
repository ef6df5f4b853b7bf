"""Compare the duration of a node check of 32 nodes with one of 5, each with three faulty nodes.

    python benchmarks/check_nodes.py [--repeats N] [--large N] [--json]

Builds both virtual clusters (needs root) and injects faults into the same three nodes of each: one
off, one with a wrong host key, one that hangs. Checks both in turn, verifies every verdict, and
compares the durations; the hung host may cost its timeout once. With `--healthy` there are no
faults and no timeouts, so on one machine the ratio is that of the work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import compare, show

_ROOT = Path(__file__).resolve().parents[1]
_FAULTS = {1: "off", 3: "wrong-key", 4: "hang"}
_BROKEN_CHECK = {1: "port", 3: "login", 4: "login"}
# Skipped, because all nodes share this machine's load, and the source may change meanwhile.
_SKIPPED = "cpu,env"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A virtual cluster that this program builds and removes."""

    name: str
    n_nodes: int
    hosts_dir: Path

    def call(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        argv = ["bash", "setup/virtual_cluster.sh", command, "--name", self.name, *words]
        return subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=False)

    def build(self, faults: dict[int, str]) -> None:
        words = ["--nodes", str(self.n_nodes), "--bandwidth", "1gbit"]
        self.call("up", *words, "--hosts-dir", str(self.hosts_dir)).check_returncode()
        for index, kind in faults.items():
            self.call("fault", str(index), "--kind", kind).check_returncode()

    def check(self, timeout_s: float) -> dict[str, Any]:
        """Run the check on node 0; returns its JSON."""
        script = str(_ROOT / "setup" / "check_nodes.sh")
        hostfile = str(self.hosts_dir / f"virtual-{self.name}.txt")
        flags = ["--json", "--skip", _SKIPPED, "--timeout", f"{timeout_s}s"]
        flags += ["--launch-timeout", "180s", "--env", sys.prefix]
        done = self.call("run", "--", "bash", script, hostfile, *flags)
        if not done.stdout:
            raise SystemExit(f"check_nodes: no answer from {self.name}: {done.stderr}")
        return dict(json.loads(done.stdout))


def mistakes(document: dict[str, Any], faults: dict[int, str]) -> list[str]:
    """Wrong verdicts: an undetected fault, or a healthy node that is not OK."""
    wrong = []
    for index, host in enumerate(document["hosts"]):
        statuses = {f["check"]: f["status"] for f in host["findings"]}
        if index in faults:
            check = _BROKEN_CHECK[index]
            if statuses[check] != "CRITICAL":
                wrong.append(f"{host['host']} is {faults[index]}, but {check} {statuses[check]}")
        elif bad := {check for check, status in statuses.items() if status != "OK"}:
            wrong.append(f"{host['host']} is healthy, but not OK in {', '.join(sorted(bad))}")
    return wrong


def measure(
    clusters: list[Cluster], faults: dict[int, str], *, n_repeats: int, timeout_s: float
) -> dict[str, list[float]]:
    """Check the clusters in turn; returns the durations by cluster."""
    durations_s: dict[str, list[float]] = {cluster.name: [] for cluster in clusters}
    for _ in range(n_repeats):
        for cluster in clusters:
            document = cluster.check(timeout_s)
            if wrong := mistakes(document, faults):
                raise SystemExit(f"check_nodes: {len(wrong)} wrong verdicts: {'; '.join(wrong)}")
            durations_s[cluster.name].append(document["duration_s"])
            print(
                f"{cluster.n_nodes} nodes: {document['duration_s']:.1f} s, all verdicts right",
                file=sys.stderr,
            )
    return durations_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", type=int, default=5)
    parser.add_argument("--large", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds one host may cost")
    parser.add_argument("--healthy", action="store_true", help="break no node")
    parser.add_argument("--json", action="store_true", help="one object per comparison")
    options = parser.parse_args()
    faults = {} if options.healthy else _FAULTS
    with tempfile.TemporaryDirectory() as directory:
        small, large = (
            Cluster(name=f"bench{n}", n_nodes=n, hosts_dir=Path(directory))
            for n in (options.small, options.large)
        )
        try:
            small.build(faults)
            large.build(faults)
            found = measure(
                [small, large], faults, n_repeats=options.repeats, timeout_s=options.timeout
            )
        finally:
            small.call("down")
            large.call("down")
    state = "healthy" if options.healthy else "three broken"
    ours, theirs = found[large.name], found[small.name]
    name = f"check_nodes, {state}: {options.large} nodes over {options.small} (at most 2)"
    comparisons = [compare(name, ours, theirs)]
    if faults:
        limits = [options.timeout] * len(theirs)
        name = f"check_nodes, {state}: {options.small} nodes over the timeout (about 1)"
        comparisons.append(compare(name, theirs, limits))
    show(comparisons, as_json=options.json)


if __name__ == "__main__":
    main()

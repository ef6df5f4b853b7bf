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
from pathlib import Path
from typing import Any

from comparison import compare, show
from faults_cluster import ROOT, Cluster

_FAULTS = {1: "off", 3: "wrong-key", 4: "hang"}
_BROKEN_CHECK = {1: "port", 3: "login", 4: "login"}
# Skipped, because all nodes share this machine's load, and the source may change meanwhile.
_SKIPPED = "cpu,env"


def check(cluster: Cluster, timeout_s: float) -> dict[str, Any]:
    """Run the check on node 0; returns its JSON."""
    flags = ["--json", "--skip", _SKIPPED, "--timeout", f"{timeout_s}s"]
    flags += ["--launch-timeout", "180s", "--env", sys.prefix]
    script = str(ROOT / "setup" / "check_nodes.sh")
    argv = cluster.argv("run", "--", "bash", script, str(cluster.hostfile), *flags)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"check_nodes: no answer from {cluster.name}: {done.stderr}")
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
            document = check(cluster, timeout_s)
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
            Cluster(f"bench{n}", Path(directory), n) for n in (options.small, options.large)
        )
        try:
            for cluster in (small, large):
                cluster.up("--bandwidth", "1gbit")
                for index, kind in faults.items():
                    cluster.fault(index, kind)
            found = measure(
                [small, large], faults, n_repeats=options.repeats, timeout_s=options.timeout
            )
        finally:
            small.down()
            large.down()
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

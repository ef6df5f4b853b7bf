"""Run PipeDream's own optimizer on a profile and print its CPU seconds.

    python benchmarks/pipedream_theirs.py CHECKOUT PROFILE --machines 4 --bandwidth 1e9

CHECKOUT is a clone of https://github.com/msr-fiddle/pipedream. The timer starts after its optimizer
has read the profile, as for this harness' planner. `--compress` first merges parallel branches by
PipeDream's own function, without which the optimizer does not end on inception_v3.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  (the optimizer imports it while it is timed)


def _graph_class(checkout: Path) -> Any:
    sys.path[:0] = [str(checkout), str(checkout / "optimizer")]
    with contextlib.suppress(ImportError):
        import graphviz  # noqa: F401
    sys.modules.setdefault("graphviz", types.ModuleType("graphviz"))  # only used for drawings
    import graph

    return graph.Graph


def optimizer_cpu_s(
    checkout: Path, profile: Path, machines: list[str], bandwidth: list[str], *, compress: bool
) -> float:
    """CPU seconds from the profile's graph to the plan.

    Raises:
        OSError: the checkout has no optimizer, or the profile cannot be read.
    """
    graph_class = _graph_class(checkout)
    read, text = graph_class.from_str, profile.read_text()
    if compress:
        text = str(read(text).compress_branches())
    begin_s: list[float] = []

    def timed(words: str) -> Any:
        found = read(words)
        begin_s.append(time.process_time())
        return found

    graph_class.from_str = timed
    script = checkout / "optimizer/optimizer_graph_hierarchical.py"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.txt"
        path.write_text(text)
        sys.argv = [script.name, "-n", *machines, "-b", *bandwidth, "-f", str(path)]
        os.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(script), run_name="__main__")
    return time.process_time() - begin_s[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--machines", nargs="+", required=True, help="workers, innermost first")
    parser.add_argument("--bandwidth", nargs="+", required=True, help="bytes/s, innermost first")
    parser.add_argument("--compress", action="store_true")
    args = parser.parse_args()
    found = optimizer_cpu_s(
        args.checkout.resolve(),
        args.profile.resolve(),
        args.machines,
        args.bandwidth,
        compress=args.compress,
    )
    print(f"{found:.6f}")


if __name__ == "__main__":
    main()

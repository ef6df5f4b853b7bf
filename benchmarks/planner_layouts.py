"""Time and memory of planning a GPT of 96 layers on 64 to 4096 devices in nodes of 8.

    python benchmarks/planner_layouts.py [--quick] [--json]

Each search is a user's command line, `harness.plan search --cost layouts`, in a separate process;
its CPU seconds are those of the whole process, with imports and reading files, so that other work
on the machine does not count. A search before the first one compiles kernels. Times of layers are
FLOPs at a fixed rate. The target is 60 s and 4 GiB for 1024 devices, and growth slower than the
devices squared.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from comparison import compare_extremes

from harness.measure.text import table
from harness.plan.importing.times import (
    LayerTime,
    PlannedLayer,
    TimeKey,
    chain_graph,
    layer_profile,
)

SIZES = (64, 256, 1024, 4096)
TARGET_S, TARGET_BYTES = 60.0, 4 * 2**30
N_LAYERS, WIDTH, TOKENS, BATCH = 96, 12288, 2048, 4096
FLOPS = 150e12  # of a device
OVERHEAD_S = 1e-4  # of a layer
PARTS = (1, 2, 4, 8)


class Row(NamedTuple):
    """One search."""

    n_devices: int
    wall_s: float
    cpu_s: float
    search_cpu_s: float
    peak_bytes: int
    plan: str
    n_layouts: int

    def cells(self) -> list[str]:
        return [
            str(self.n_devices),
            f"{self.wall_s:.1f}",
            f"{self.cpu_s:.1f}",
            f"{self.search_cpu_s:.1f}",
            f"{self.peak_bytes / 2**20:.0f}",
            str(self.n_layouts),
            self.plan,
        ]


HEADER = ["devices", "wall s", "CPU s", "search CPU s", "peak MiB", "layouts", "plan"]


def write_model(folder: Path) -> list[str]:
    """The flags of a graph and a profile with 16-bit weights."""
    layers = [
        PlannedLayer(
            name=f"layer{k}",
            parameter_bytes=2 * 12 * WIDTH**2,
            output_bytes=2 * TOKENS * WIDTH,
            saved_bytes=2 * 16 * TOKENS * WIDTH,
        )
        for k in range(N_LAYERS)
    ]
    graph = chain_graph("gpt", layers, BATCH, max(PARTS))
    forward_flops = 24 * TOKENS * WIDTH**2 * (1 + TOKENS / (6 * WIDTH))
    times = {}
    for tp in PARTS:
        for samples in (1, 2, 4, 8):
            seconds = samples * forward_flops / FLOPS / tp + OVERHEAD_S
            times[TimeKey("device", samples, tp)] = [LayerTime(seconds, 2 * seconds)] * N_LAYERS
    (folder / "gpt.graph.json").write_bytes(graph.to_json())
    (folder / "gpt.json").write_bytes(layer_profile(graph, times).to_json())
    return ["--profile", str(folder / "gpt.json")]


def measure(n_devices: int, model: list[str]) -> Row:
    command = [sys.executable, "-m", "harness.plan", "search", *model, "--cost", "layouts"]
    command += ["--topology", f"{n_devices // 8}x8", "--bandwidth", "3e11,2e11"]
    command += ["--memory", "80GB", "--batch-size", str(BATCH), "--json"]
    start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout)
    return Row(
        n_devices=n_devices,
        wall_s=wall_s,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        search_cpu_s=result["search_cpu_s"],
        peak_bytes=result["peak_rss_bytes"],
        plan=result["explanation"][0],
        n_layouts=result["n_proposals"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 256 devices")
    parser.add_argument("--json", action="store_true", help="one object per comparison")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        measure(SIZES[0], model)
        rows = [measure(n, model) for n in (SIZES[:2] if args.quick else SIZES)]
    out = sys.stderr if args.json else sys.stdout
    print("\n".join(table(HEADER, [row.cells() for row in rows])), file=out)
    first, last = rows[0], rows[-1]
    power = math.log(last.cpu_s / first.cpu_s) / math.log(last.n_devices / first.n_devices)
    print(f"seconds grow as the devices to the power of {power:.2f}", file=out)
    for row in rows if args.json else ():
        what = f"layouts of a GPT of {N_LAYERS} layers on {row.n_devices}"
        more = row._asdict()
        print(
            json.dumps(
                compare_extremes(f"{what}, 60 s over CPU seconds", [TARGET_S / row.cpu_s], **more)
            )
        )
        ratio = TARGET_BYTES / row.peak_bytes
        print(json.dumps(compare_extremes(f"{what}, 4 GiB over memory", [ratio], **more)))


if __name__ == "__main__":
    main()

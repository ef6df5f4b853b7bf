"""Compare the parameters trained by DDP with those trained on one device.

    python benchmarks/ddp_equivalence.py --models lenet alexnet --ranks 2 3 5
    python benchmarks/ddp_equivalence.py --dtype fp64

Starts the train workload by the real mpirun, `single` and `ddp` on the same global batches, with an
uneven last one, and compares the models that they write. The ratio is the largest difference of a
parameter over the tolerance, so at most 1 counts as equal. Dropout is off, because each rank draws
its own masks; batch normalisation is frozen, because local statistics make a different model.

In fp64 the same models train from the same weights on the same samples (double_models.py): effects
of the order of sums are 2^29 times smaller there, effects of a wrong algorithm are not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from comparison import compare_extremes, show
from safetensors.torch import load_file

_ROOT = Path(__file__).resolve().parents[1]
_TOLERANCES = {"fp32": 1e-5, "fp64": 1e-10}


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = ("lenet", "alexnet", "resnet18", "vit_b_16", "dlrm")
    """Models of the train workload."""
    ranks: tuple[int, ...] = (2, 3, 5)
    """Numbers of ranks, on this host."""
    steps: int = 20
    """Optimizer steps."""
    batch: int = 13
    """Samples of the global batch."""
    n_samples: int = 35
    """Samples of an epoch; not a multiple of the batch size, so that the last batch is uneven."""
    image_size: int = 64
    """Side of the images (28 for lenet)."""
    learning_rate: float = 0.01
    """Learning rate of SGD with momentum 0.9."""
    dtype: Literal["fp32", "fp64"] = "fp32"
    """Precision of the training: fp32 or fp64."""
    tolerance: float = 0.0
    """Tolerated difference, by the order of sums; 0 means 1e-5, in fp64 1e-10."""
    json: bool = False
    """Print one JSON object per comparison."""


def train(model: str, options: Options, results: Path) -> dict[int, Path]:
    """Train; returns the model files by number of ranks; 1 is training on a single device."""
    mpirun = Path(sys.executable).with_name("mpirun")
    side = ["--image-size", str(28 if model == "lenet" else options.image_size)]
    name = f"double_models:{model}" if options.dtype == "fp64" else model
    command = [
        str(mpirun), "--oversubscribe", "-np", str(max(options.ranks)), str(_ROOT / "entry.sh"),
        "train", "--model", name, "--strategy", "single", "ddp",
        "--n-ranks", *map(str, options.ranks), "--batch-size", str(options.batch),
        "--n-samples", str(options.n_samples), "--steps", str(options.steps), "--warm-up", "0",
        "--no-sync-steps", "0", *([] if model == "dlrm" else side), "--dropout", "0",
        "--learning-rate", str(options.learning_rate), "--batch-norm", "frozen", "--save-model",
        "--results", str(results),
    ]  # fmt: skip
    consent = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {**consent, **os.environ, "PYTHONPATH": str(_ROOT / "benchmarks")}
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    headers = [json.loads(path.read_text()) for path in sorted(results.glob("*/run.json"))]
    return {
        1 if header["config"]["strategy"] == "single" else header["config"]["n_ranks"]: results
        / header["run_id"]
        / "model.safetensors"
        for header in headers
    }


def difference(one: Path, many: Path) -> tuple[float, int]:
    """Largest absolute difference of any parameter, and the number of parameters."""
    ours, theirs = load_file(one), load_file(many)
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    return largest, sum(tensor.numel() for tensor in ours.values())


def compare_models(model: str, options: Options) -> list[dict[str, object]]:
    tolerance = options.tolerance or _TOLERANCES[options.dtype]
    comparisons: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        models = train(model, options, Path(directory))
        for n_ranks in options.ranks:
            largest, n_parameters = difference(models[1], models[n_ranks])
            name = (
                f"ddp on {n_ranks} ranks against one, {model} {options.dtype}, {options.steps} "
                f"steps of {options.learning_rate:g}: largest difference {largest:.2g} over "
                f"{tolerance:g}"
            )
            found = compare_extremes(name, [largest / tolerance])
            comparisons.append(found | {"n_pairs": n_parameters})
    return comparisons


def main(options: Options) -> int:
    """Compare all models on all numbers of ranks; returns 1 if any differs."""
    is_unequal = False
    for model in options.models:
        comparisons = compare_models(model, options)
        show(comparisons, as_json=options.json)
        is_unequal |= any(float(str(one["ratio"])) > 1 for one in comparisons)
    return int(is_unequal)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

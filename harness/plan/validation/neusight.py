"""NeuSight: operators of a training step, one by one, and the whole step, on one GPU.

A table `MODEL-train-SEQUENCE-BATCH.csv` has each torch.fx operator with its milliseconds, the file
of the same name ending in `.json` the step.
"""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.domain.cluster import Cluster
from harness.errors import DataError
from harness.inputs import MOST_S, is_positive
from harness.plan import builders
from harness.plan.importing.times import read_operators
from harness.plan.simulate.simulator import Simulator
from harness.plan.validation import points

# bert_large-train-512-8[-fusion].json
_NAME = re.compile(r".+?-(?P<mode>train|inf)-[0-9]+-(?P<batch>[0-9]{1,9})(?P<note>-.+)?")


class _Step(msgspec.Struct):
    """The fields of a step's file that are read; latency in ms."""

    e2e_latency: float
    num_layer: int | None = None


class _Label(NamedTuple):
    path: Path
    mode: str
    batch: int
    device: str
    note: str


def _labels(folder: Path) -> list[_Label]:
    found = []
    for path in sorted(folder.rglob("*.json")):
        name = _NAME.fullmatch(path.stem)
        if name is not None:
            batch = max(1, int(name["batch"]))
            device, note = path.parent.name, name["note"] or ""
            found.append(_Label(path, name["mode"], batch, device, note))
    return found


def _case(label: _Label) -> points.SimulatedRun:
    table = label.path.with_suffix(".csv")
    if not table.is_file():
        raise points.NotExpressedError(f"no table of its operators ({label.mode}{label.note})")
    graph, profile = read_operators(
        table, device_kind=label.device, batch=label.batch, n_layers=_step(label).num_layer or 1
    )
    cluster = Cluster.uniform(1, 1, inside_bytes_per_s=1.0, memory_bytes=2**50, kind=label.device)
    return points.SimulatedRun(
        Simulator(graph, profile, cluster), builders.single(graph, label.batch)
    )


def _step(label: _Label) -> _Step:
    step = points.load_json(label.path, _Step)
    if (
        not is_positive(step.e2e_latency, MOST_S)
        or not 1 <= (step.num_layer or 1) <= points.MOST_LAYERS
    ):
        raise DataError(
            f"{label.path} has e2e_latency {step.e2e_latency} ms and {step.num_layer} layers: both "
            f"must be above 0, the second at most {points.MOST_LAYERS}"
        )
    return step


def read(folder: Path) -> points.Published:
    """All steps below a folder."""
    steps = [
        points.MeasuredStep(
            name=f"{label.path.stem} on {label.device}",
            cell=f"{label.path.stem}",
            samples=label.batch,
            measured_s=_step(label).e2e_latency / 1e3,
            build=partial(_case, label),
            part=f"{label.mode} on {label.device}",
        )
        for label in _labels(folder)
    ]
    notes = [
        "nothing is calibrated: the operators' times on the same GPU, one after the other; "
        "one layer stands for all, and each operator's time is less that of timing an empty one"
    ]
    return points.Published(steps, notes)


READER = points.SetReader("MODEL-train-SEQUENCE-BATCH.json", lambda p: bool(_labels(p)), read)

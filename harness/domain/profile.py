"""Measured forward and backward seconds of operators, by device kind, shard shape and dtype.

The profile workload writes it, planning reads it; `harness.plan.fit` interpolates between the
measured shapes.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.files import Count, FileKind, JsonFile
from harness.domain.graph import Graph
from harness.domain.sharding import has_tasks
from harness.errors import GraphError
from harness.inputs import MOST_COUNT, MOST_S, is_amount, is_positive

SCHEMA = "harness-profile"
SCHEMA_VERSION = 2

# A normal distribution's quartiles are 1.349 standard deviations apart; those of n samples,
# linearly interpolated, are closer by a share of 1.12 / n (within 6 % for 2 to 100 samples).
_QUARTILES, _FEW = 1.349, 1.12


# A GPU's small batch waits for its host if its calibration is above the largest batch's by more
# than a small step varies.
_WAITING = 1.1

MeasurementKey = tuple[str, str, tuple[tuple[str, int], ...], str]

# Names in a profile of the dtypes of training.
DTYPE_NAMES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


class Measurement(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Median times of one operator on one kind of device at one shape.

    Attributes:
        device_kind: as in `Device.kind`.
        operator: the operator's `profile_key`.
        shape: of the output of the timed shard; empty when unknown, and then the times hold for
            the graph's whole minibatch.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass, to inputs and parameters.
        saved_bytes: bytes that forward keeps for backward; None when not measured.
        spread: interquartile range over the median of forward plus backward; None when unknown.
        n_samples: number of samples of the medians; None when unknown.
    """

    device_kind: str
    operator: str
    forward_s: float
    backward_s: float
    shape: dict[str, Count] = {}
    dtype: str = "float32"
    saved_bytes: Count | None = None
    spread: float | None = None
    n_samples: Count | None = None

    @property
    def key(self) -> MeasurementKey:
        """Key that identifies the measurement."""
        return measurement_key(self.device_kind, self.operator, self.shape, self.dtype)

    @property
    def relative_noise(self) -> float:
        """Relative standard error of the median, for normal samples; 0 when unknown."""
        n = self.n_samples or 0
        if self.spread is None or n < 2:
            return 0.0
        deviation = self.spread / (_QUARTILES * (1 - _FEW / n))
        return math.sqrt(math.pi / (2 * n)) * deviation

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_s"):
            value = getattr(self, field)
            if not is_amount(value, MOST_S):
                raise GraphError(
                    f"operator {self.operator!r} on {self.device_kind!r} has {field} {value}: "
                    "a time must be >= 0, and at most 1e10 s"
                )
        if self.saved_bytes is not None and self.saved_bytes < 0:
            raise GraphError(
                f"operator {self.operator!r} has saved_bytes {self.saved_bytes}: it must be >= 0"
            )
        if self.spread is not None and not is_amount(self.spread):
            raise GraphError(
                f"operator {self.operator!r} has spread {self.spread}: it must be >= 0, and at "
                "most 1e30"
            )
        sizes = self.shape.values()
        if any(size < 1 for size in sizes) or math.prod(sizes) > MOST_COUNT:
            raise GraphError(
                f"operator {self.operator!r} has shape {self.shape}: sizes must be >= 1, and their "
                "product at most 2**53"
            )


class WholeStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole model's measured step on one device, which the sum of its operators should equal.

    Attributes:
        batch: samples in the step: the graph's batch, or a smaller one.
        step_s: seconds of forward plus backward, without the optimizer, when last timed.
        operators_s: the sum over the graph's operators at the same batch.
        graph_hash: `Graph.content_hash` of the graph; empty when unknown.
        is_queued: the host queues operators that the device runs later, as a GPU does.
    """

    device_kind: str
    batch: Count
    dtype: str
    step_s: float
    operators_s: float
    graph_hash: str = ""
    is_queued: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise GraphError(
                f"the whole step on {self.device_kind!r} has batch {self.batch}: it must be >= 1"
            )
        for field in ("step_s", "operators_s"):
            value = getattr(self, field)
            if not is_positive(value, MOST_S):
                raise GraphError(
                    f"the whole step on {self.device_kind!r} has {field} {value}: it must be above "
                    "0, and at most 1e10 s"
                )

    @property
    def calibration(self) -> float:
        """Measured step over the sum of its operators; 1 for a perfect profile."""
        return self.step_s / self.operators_s


class Calibration(NamedTuple):
    """What makes the times of a graph's operators those of a step.

    Attributes:
        factor: on the time of each operator.
        host_s: seconds in which the host queues all operators, cut or not, of any batch; 0 if the
            device never waits for it.
    """

    factor: float = 1.0
    host_s: float = 0.0


class OptimizerStep(NamedTuple):
    """A kind of optimizer step.

    Attributes:
        n_states: tensors of a parameter's shape that are kept beside it.
        n_accesses: memory accesses per byte of the parameters, counted over its operations.
        flags: that choose it.
        words: its name for people.
    """

    n_states: int
    n_accesses: int
    flags: tuple[str, ...]
    words: str

    @property
    def n_fused(self) -> int:
        """Accesses in one kernel, as on a GPU: all tensors are read, and all but the gradient are
        written."""
        return 3 + 2 * self.n_states


OPTIMIZER_STEPS = {
    "sgd": OptimizerStep(0, 3, ("--momentum", "0"), "SGD without momentum"),  # p += g
    "momentum": OptimizerStep(1, 8, (), "SGD with momentum"),  # m *= a, m += g, p += m
    # Decay, two moments, root and quotient.
    "adamw": OptimizerStep(2, 20, ("--optimizer", "adamw"), "AdamW"),
}


class OptimizerTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured speed of an optimizer's step on one kind of device.

    Attributes:
        optimizer: one of OPTIMIZER_STEPS.
        s_per_byte: seconds of a step per byte of parameters.
    """

    device_kind: str
    optimizer: str
    s_per_byte: float

    def __post_init__(self) -> None:
        if not is_amount(self.s_per_byte, MOST_S):
            raise GraphError(
                f"optimizer {self.optimizer!r} on {self.device_kind!r} takes {self.s_per_byte} s "
                "per byte: it must be >= 0, and at most 1e10 s"
            )


class Profile(JsonFile, frozen=True, kw_only=True):
    """Measurements and their provenance.

    Attributes:
        model: the model's name.
        graph_hash: `Graph.content_hash` of the measured graph; empty if valid for any graph.
        provenance: library versions, host, commit, date, source file.
    """

    FILE = FileKind(
        "profile file",
        SCHEMA,
        SCHEMA_VERSION,
        GraphError,
        "delete it, and measure again with `./entry.sh profile`",
    )

    model: str
    measurements: list[Measurement]
    graph_hash: str = ""
    whole_steps: list[WholeStep] = msgspec.field(default_factory=list)
    optimizers: list[OptimizerTime] = msgspec.field(default_factory=list)
    provenance: dict[str, str] = msgspec.field(default_factory=dict)
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        seen = set()
        for point in self.measurements:
            if point.key in seen:
                raise GraphError(
                    f"profile {self.model!r} measures operator {point.operator!r} twice on "
                    f"{point.device_kind!r} at {point.shape} {point.dtype}: keep one"
                )
            seen.add(point.key)

    def optimizer_s_per_byte(self, device_kind: str, optimizer: str) -> float | None:
        """Seconds of an optimizer's step per byte of parameters; None where it was not timed."""
        for time in self.optimizers:
            if (time.device_kind, time.optimizer) == (device_kind, optimizer):
                return time.s_per_byte
        return None

    @property
    def timed_optimizer(self) -> str:
        """The one of OPTIMIZER_STEPS that it has timed: of several, or of none, SGD with
        momentum."""
        timed = {time.optimizer for time in self.optimizers} & set(OPTIMIZER_STEPS)
        return "momentum" if "momentum" in timed else min(timed, default="momentum")

    @property
    def device_kinds(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(point.device_kind for point in self.measurements))

    def calibration_of(
        self, graph_hash: str, device_kind: str, samples: int, dtype: str | None = None
    ) -> Calibration:
        """What makes the times of a graph's operators those of a step (see `WholeStep`).

        The factor is interpolated linearly in the logarithm of the batch, and constant beyond the
        measured batches; it is 1 if unknown. Where the smallest batch on a GPU waits for the host,
        a step takes the longer of its operators' time, by the factor of the largest batch, and of
        the time in which the host queues them, whatever the batch: the smallest batch's step.

        Args:
            dtype: of the steps; None for a profile of one dtype.
        """
        known = {
            step.batch: step
            for step in self.whole_steps
            if (step.graph_hash, step.device_kind) == (graph_hash, device_kind)
            if dtype in (None, step.dtype)
        }
        if not known:
            return Calibration()
        steps = [known[size] for size in sorted(known)]
        smallest, largest = steps[0], steps[-1]
        if largest.is_queued and smallest.calibration > _WAITING * largest.calibration:
            return Calibration(largest.calibration, smallest.step_s)
        sizes = [math.log(step.batch) for step in steps]
        factors = [step.calibration for step in steps]
        return Calibration(float(np.interp(math.log(samples), sizes, factors)))

    def calibrations(self, graph_hash: str) -> dict[str, float]:
        """The calibration of each measured step of a graph, by kind of device and batch."""
        return {
            f"{step.device_kind}, {step.batch} samples": step.calibration
            for step in self.whole_steps
            if step.graph_hash == graph_hash
        }

    def content_hash(self) -> str:
        """Hash of the measurements without calibration, in 16 hex digits; strategies store it."""
        data = msgspec.json.encode(self.measurements, order="sorted")
        return hashlib.sha256(data).hexdigest()[:16]


def measurement_key(
    device_kind: str, operator: str, shape: dict[str, int], dtype: str
) -> MeasurementKey:
    """Key of a measurement; the order of dims matters."""
    return device_kind, operator, tuple(shape.items()), dtype


RESULTS = Path("results")


def default_profile(
    model: str, dtype: str = "fp32", results: Path = RESULTS, *, kinds: Sequence[str] = ()
) -> Path:
    """Where a model's profile in one dtype goes unless the user says otherwise.

    Args:
        kinds: further words on how steps are computed, such as compiled.
    """
    words = [model, *([] if dtype == "fp32" else [dtype]), *kinds]
    name = re.sub(r"[^\w.-]+", "_", "-".join(words))
    return results / f"profile-{name}.json"


def graph_beside(profile: Path) -> Path:
    """The graph that a profile was measured for: `profile-vgg16.json` has its own in
    `profile-vgg16.graph.json`."""
    return profile.with_suffix(".graph.json")


def knows(profile: Profile, graph: Graph, cluster: Cluster) -> bool:
    """Whether a profile measured every operator on every kind of device."""
    known = {(point.device_kind, point.operator) for point in profile.measurements}
    return all(
        (device.kind, operator.profile_key) in known
        for device in cluster.devices
        for operator in filter(has_tasks, graph.operators)
    )

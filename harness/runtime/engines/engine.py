"""What carries a training strategy out: the interface that every engine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from harness.domain.sharding import BUCKET_BYTES
from harness.runtime.data.batch import Batch
from harness.runtime.engines.optimizers import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of one global batch, in samples.

    Attributes:
        n_local: its own; 0 when its batch only stands in and must not count.
        n_global: the job's.
    """

    n_local: int
    n_global: int

    @property
    def weight(self) -> float:
        """What the sum of the local losses is multiplied by, so that the ranks' parts add up."""
        return 1.0 / self.n_global if self.n_local else 0.0


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every engine.

    Attributes:
        dtype: fp32, tf32, bf16 or fp16.
        bucket_bytes: gradients that are reduced together.
        zero_stage: what DeepSpeed's ZeRO partitions: 0 nothing, 1 optimizer state, 2 gradients too.
        batch: largest share of this rank.
    """

    dtype: str
    optimizer: OptimizerOptions
    bucket_bytes: int = BUCKET_BYTES
    zero_stage: int = 0
    batch: int = 1


class Engine(Protocol):
    """Trains a model step by step; all ranks of the run call the same methods in the same order.

    The phases of a step are recorded as spans whose boundaries are shared, so that they sum to it.
    """

    def step(self, fetch: Callable[[], Batch], share: Share, *, is_muted: bool = False) -> Tensor:
        """Carry out one optimizer step.

        Args:
            fetch: hands over this rank's next batch, on the host.
            is_muted: leaves out what ranks tell each other in a step, to read what
                that costs; what is computed means nothing from then on.

        Returns:
            This rank's part of the global batch's mean loss, detached, on the device; the sum
            over ranks is the mean.
        """
        ...

    @property
    def model(self) -> nn.Module:
        """The model as one device would have it."""
        ...

    @property
    def n_synchronisations(self) -> int:
        """Sums of gradients started in the last step that was not muted."""
        ...

    @property
    def can_be_muted(self) -> bool:
        """Whether `step` takes `is_muted=True`."""
        ...

    def model_state(self) -> dict[str, Tensor]:
        """The model's state as one device has it."""
        ...

    def full_state(self) -> dict[str, Any]:
        """Model and optimizer state as one device has them, under `model` and `optimizer`."""
        ...

"""The reasons to change a running training's strategy: a policy's inputs and its answer."""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from harness.domain.strategy import Strategy
from harness.runtime.ranks.world import Context
from harness.workloads.train.cache import TrainingCache
from harness.workloads.train.config import TrainCase
from harness.workloads.train.next_plan import BesideSearch, NextPlanner
from harness.workloads.train.plan import Planned
from harness.workloads.train.setup import Training

# A change whose step is known is prepared so many steps before.
LEAD_STEPS = 5
# Seconds that a change is taken to stand still beside its transfer before one has been measured.
STILL_S = 0.1


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """A change that has been decided on, on every rank.

    Attributes:
        step: the first measured step after it; None: as soon as it is prepared.
        planned: the next strategy; None: the current one stays.
        n_frozen: layers that are frozen from then on; None: those that are.
        n_skipped: layers that the cache replaces from then on; any change may begin to use it.
        request: id of the controller's request; empty if no controller waits for an answer.
        error: why the request cannot be met; nothing changes then.
    """

    why: str
    step: int | None = None
    planned: Planned | None = None
    n_frozen: int | None = None
    n_skipped: int | None = None
    request: str = ""
    error: str = ""


class Policy(Protocol):
    """One reason for changes; all ranks construct it and call `due` between the same steps."""

    def due(self, step: int) -> Due | None:
        """The next change, once; None if there is none yet.

        Args:
            step: the measured step that comes next.
        """
        ...

    def next_step(self) -> int | None:
        """The measured step of its next change; None if that is not known ahead."""
        return None

    def close(self) -> None:
        """Free the policy's resources after the last step."""


@dataclass(kw_only=True)
class Current:
    """The strategy that trains now, on every rank; kept up to date by StrategyChanges.

    Attributes:
        n_frozen: layers that are not trained.
        n_skipped: those of them whose outputs are read from the cache.
        still_s: seconds that the last change stood still beside its transfer: allocation, votes,
            the first batch, under NCCL also the build of its engine. On rank 0.
    """

    planned: Planned
    n_frozen: int = 0
    n_skipped: int = 0
    still_s: float = STILL_S

    @property
    def trained(self) -> tuple[Strategy, int, int]:
        """What determines the work of every rank in a step."""
        return self.planned.strategy, self.n_frozen, self.n_skipped


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """The inputs of policies.

    Attributes:
        planner: used on rank 0 only.
        training: before the first step.
        start: the plan with which training began, in an earlier run if this one continues it.
        cache: None with --cache off.
        searches: of all policies.
    """

    case: TrainCase
    context: Context
    planner: NextPlanner
    training: Training
    start: Planned
    current: Current
    cache: TrainingCache | None
    searches: list[BesideSearch] = field(default_factory=list)

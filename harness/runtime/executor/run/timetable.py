"""The actions of a rank in each step, and the order of all ranks' actions.

Asynchronous training does not empty the pipeline between steps: microbatches are numbered over all
steps, and a flush finishes the microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property

from harness.domain.schedule import (
    Action,
    flush_actions,
    rank_actions,
    unflushed_actions,
    unflushed_position,
)
from harness.domain.strategy import Strategy

# (stage, microbatch, is_backward) -> position among the actions of the stage's ranks.
Order = Callable[[int, int, bool], int]


class Timetable:
    """The schedule of one rank.

    Args:
        split: stages that compute weight gradients separately, under zero bubble.

    Attributes:
        n_streamed: microbatches since the last flush; 0 if every step flushes.
        order: positions of all ranks' actions.
    """

    def __init__(
        self, strategy: Strategy, rank: int, *, is_asynchronous: bool, split: Collection[int]
    ) -> None:
        self._strategy, self._split = strategy, split
        self._is_asynchronous = is_asynchronous
        self._n_ranks = strategy.n_ranks()
        stages = [k for k, devices in enumerate(strategy.stage_devices()) if rank in devices]
        self._rank = stages[0] % self._n_ranks if stages else None
        self.n_streamed = 0
        self.order: Order = self._unflushed_order if is_asynchronous else self._flushed_order()

    def step(self) -> tuple[Action, ...]:
        """The actions of the next step; empty for a device without a stage."""
        if self._rank is None or not self._is_asynchronous:
            return self._flushed
        return tuple(
            unflushed_actions(
                n_microbatches=self._strategy.n_microbatches,
                n_ranks=self._n_ranks,
                rank=self._rank,
                n_before=self.n_streamed,
            )
        )

    @property
    def n_finished(self) -> int:
        """How many microbatches all ranks had finished at the end of the previous step."""
        return self.n_streamed - (self._n_ranks - 1)

    def advance(self) -> None:
        """Count the microbatches of a finished step."""
        if self._is_asynchronous:
            self.n_streamed += self._strategy.n_microbatches

    def flush(self) -> tuple[Action, ...]:
        """The actions that empty the pipeline."""
        if self._rank is None:
            return ()
        n_ranks, n_before = self._n_ranks, self.n_streamed
        return tuple(flush_actions(n_ranks=n_ranks, rank=self._rank, n_before=n_before))

    @cached_property
    def _flushed(self) -> tuple[Action, ...]:
        if self._rank is None:
            return ()
        actions = self._actions_of(self._rank)
        return tuple(a for a in actions if a.kind != "weight" or a.stage in self._split)

    def _actions_of(self, rank: int) -> Iterator[Action]:
        strategy = self._strategy
        n_stages, n_microbatches = len(strategy.stages), strategy.n_microbatches
        return rank_actions(
            strategy.schedule, n_stages=n_stages, n_microbatches=n_microbatches,
            n_ranks=self._n_ranks, rank=rank,
        )  # fmt: skip

    def _flushed_order(self) -> Order:
        positions = {
            (action.stage, action.microbatch, action.kind == "backward"): at
            for rank in range(self._n_ranks)
            for at, action in enumerate(self._actions_of(rank))
            if action.kind != "weight"
        }
        return lambda *action: positions[action]

    def _unflushed_order(self, stage: int, microbatch: int, is_backward: bool) -> int:
        return unflushed_position(
            microbatch, n_ranks=self._n_ranks, rank=stage, is_backward=is_backward
        )

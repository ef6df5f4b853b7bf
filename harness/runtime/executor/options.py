"""Options of the executor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.strategy import Strategy, validate
from harness.errors import StrategyError
from harness.runtime.executor.geometry.slices import WeightSlice

# Larger pieces are sent separately, because they take at least 0.5 ms on 1 Gbit/s, more than the
# overhead of a message (a few tenths of 1 ms).
LARGEST_JOINED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ExecutorPlan:
    """A strategy, with the options of training that a strategy does not contain.

    Attributes:
        strategy: device k of the strategy is rank k.
        batch_norm: `local` normalises each block by its own statistics, as DDP does; `global` by
            the statistics of the whole microbatch, as one device does.
        dropout: `local` draws a mask for each block; `exact` takes the block of the mask of the
            whole tensor, so that every strategy of as many microbatches trains the same.
        is_asynchronous: 1F1B without flushes, with an optimizer step after each microbatch and
            weight stashing, as in PipeDream: stage s of S computes gradients with weights that are
            S - 1 - s updates old.
        is_compiled: segments are compiled by torch.compile.
        timeout_s: how long a rank waits for another before it raises an error.
    """

    strategy: Strategy
    batch_norm: Literal["local", "global"] = "local"
    dropout: Literal["local", "exact"] = "local"
    is_asynchronous: bool = False
    is_compiled: bool = False
    seed: int = 0
    timeout_s: float = 300.0

    def check(self, graph: Graph, n_ranks: int) -> None:
        """Check the strategy against model, ranks and schedule."""
        if self.strategy.n_devices > n_ranks:
            raise StrategyError(
                f"strategy {self.strategy.name!r} is for {self.strategy.n_devices} devices, and "
                f"there are {n_ranks} ranks: start more, or search again"
            )
        ranks = Cluster.uniform(1, n_ranks, kind="rank", memory_bytes=1, inside_bytes_per_s=1.0)
        validate(self.strategy, graph, ranks)
        self.check_schedule()

    def check_schedule(self) -> None:
        """Check that asynchronous training uses 1F1B without recomputation."""
        if self.is_asynchronous and self.strategy.schedule != "1f1b":
            raise StrategyError(
                f"asynchronous training runs 1f1b, strategy {self.strategy.name!r} has schedule "
                f"{self.strategy.schedule}: use 1f1b"
            )
        if self.is_asynchronous and self.strategy.shard_state != "none":
            raise StrategyError(
                "asynchronous training updates weights on every device that holds them, strategy "
                f"{self.strategy.name!r} has the shard_state {self.strategy.shard_state}: make it "
                "none"
            )
        recomputed = [k for k, stage in enumerate(self.strategy.stages) if stage.recompute]
        if self.is_asynchronous and recomputed:
            raise StrategyError(
                "asynchronous training keeps activations, strategy "
                f"{self.strategy.name!r} recomputes stage {recomputed[0]}: drop its recompute"
            )

    def check_hooks(self, parameter: str | None) -> None:
        """Check that no hook of a parameter needs its whole gradient where each rank has a part.

        Args:
            parameter: the name of a parameter with a hook; None if there is none.
        """
        if parameter is not None and self.strategy.shard_state != "none":
            raise StrategyError(
                f"parameter {parameter!r} has a hook on its whole gradient, of which each rank "
                f"gets a part under the shard_state {self.strategy.shard_state} of strategy "
                f"{self.strategy.name!r}: remove the hook, or make the shard_state none"
            )

    def check_tied(self, holders: Iterable[tuple[WeightSlice, tuple[int, ...]]]) -> None:
        """Check that asynchronous training has no weight tied over several stages.

        Args:
            holders: (slice, devices) of each trained weight.
        """
        devices_of = self.strategy.stage_devices()
        for piece, devices in holders:
            stages = [k for k, each in enumerate(devices_of) if set(each) & set(devices)]
            if self.is_asynchronous and len(stages) > 1:
                raise StrategyError(
                    "asynchronous training updates each stage separately, weight "
                    f"{piece.name!r} is tied over stages {stages}: use it in one stage, or drop "
                    "--asynchronous"
                )

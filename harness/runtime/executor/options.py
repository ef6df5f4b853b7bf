"""Options of the executor beside the strategy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.strategy import Strategy, validate
from harness.errors import StrategyError

# A larger piece takes 0.5 ms and more on 1 Gbit/s, a message itself a few tenths of one: it leaves
# at once.
LARGEST_JOINED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ExecutorPlan:
    """What is trained, and how the parts that a strategy leaves open are done.

    Attributes:
        strategy: its device k is the world's rank k.
        batch_norm: `local` normalises each block by its own statistics, as DDP does; `global` by
            those of the whole microbatch, as one device does.
        dropout: `local` draws each block's mask by itself; `exact` draws what the block of the
            whole tensor would have drawn, so that every strategy trains the same.
        is_asynchronous: 1F1B without a flush between microbatches, each of which is a minibatch of
            its own with an optimizer step, and weights stashed, as PipeDream trains: stage s of S
            computes gradients with weights S - 1 - s updates old.
        timeout_s: how long a rank waits for another before it gives up.
        is_held: the captured graph has been held to the model (`runtime.faithfulness`) already;
            else the engine does that before it trains.
    """

    strategy: Strategy
    batch_norm: Literal["local", "global"] = "local"
    dropout: Literal["local", "exact"] = "local"
    is_asynchronous: bool = False
    seed: int = 0
    timeout_s: float = 300.0
    is_held: bool = False

    def check(self, graph: Graph, n_ranks: int) -> None:
        """Refuse what cannot be trained.

        Raises:
            StrategyError: the strategy does not fit the model or the ranks, or updates after each
                microbatch but not by 1F1B that keeps what it computed.
        """
        ranks = Cluster.uniform(1, n_ranks, kind="rank", memory_bytes=1, inside_bytes_per_s=1.0)
        validate(self.strategy, graph, ranks)
        self.check_schedule()

    def check_schedule(self) -> None:
        """Refuse to train by another schedule than 1F1B without a flush.

        Raises:
            StrategyError: names the schedule.
        """
        if self.is_asynchronous and self.strategy.schedule != "1f1b":
            raise StrategyError(
                f"asynchronous training runs 1f1b, strategy {self.strategy.name!r} has schedule "
                f"{self.strategy.schedule}: use --schedule 1f1b"
            )
        again = [k for k, stage in enumerate(self.strategy.stages) if stage.recompute]
        if self.is_asynchronous and again:
            raise StrategyError(
                "asynchronous training keeps what it computed, strategy "
                f"{self.strategy.name!r} computes stage {again[0]} again: drop its recompute"
            )

    def check_tied(self, holders: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Refuse weights of several stages where each stage updates its own.

        Args:
            holders: of each trained weight, its devices.

        Raises:
            StrategyError: names the weight.
        """
        devices_of = self.strategy.stage_devices()
        for name, devices in holders:
            stages = [k for k, own in enumerate(devices_of) if set(own) & set(devices)]
            if self.is_asynchronous and len(stages) > 1:
                raise StrategyError(
                    f"asynchronous training updates each stage by itself, weight {name!r} is tied "
                    f"over stages {stages}: use it in one stage, or drop --asynchronous"
                )

"""Replicas whose parameters are averaged (`engines.local_sgd`), so that each sums gradients alone.

Ranks that exchange activations, and on several hosts those of a host, train a replica:

    replica 0   rank 0 --- activations --- rank 1
                  |                          |        averages, of ranks that hold the same slices
    replica 1   rank 2 --- activations --- rank 3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from harness.domain.shard_state import Group, averaged_replicas, sharing_groups
from harness.domain.strategy import Strategy
from harness.errors import StrategyError
from harness.runtime.executor.transport.groups import Groups
from harness.runtime.ranks.world import World


class Replicas:
    """The ranks of each replica, equal on all ranks; a training without averages has one replica.

    Args:
        found: the ranks of each; None: all ranks are one.

    Attributes:
        all: the ranks of each.
        own: those of this rank's.
        number: of this rank's.
        n: their number.
        is_sharded: several holders of a weight may each keep a part of its state.
    """

    def __init__(
        self, strategy: Strategy, world: World, found: Iterable[Group] | None = None
    ) -> None:
        self._strategy, self._world = strategy, world
        self.all = sorted(found or [tuple(range(world.size))])
        self.number = next(k for k, ranks in enumerate(self.all) if world.rank in ranks)
        self.own, self.n = self.all[self.number], len(self.all)
        self.is_sharded = strategy.shard_state != "none"

    @classmethod
    def of_exchanges(
        cls, strategy: Strategy, world: World, exchanges: Iterable[Iterable[int]]
    ) -> Replicas:
        """Those of ranks that exchange activations in some groups.

        Raises:
            StrategyError: all ranks are one replica.
        """
        found: list[set[int]] = [{rank} for rank in range(world.size)]
        hosts = averaged_replicas(tuple(range(world.size)), world.hostnames)
        for group in (*hosts, *exchanges):
            linked = [ranks for ranks in found if not ranks.isdisjoint(group)]
            found = [ranks for ranks in found if ranks not in linked] + [set().union(*linked)]
        if len(found) == 1:
            raise StrategyError(
                f"sync_every averages replicas, and strategy {strategy.name!r} has one, because "
                f"its {world.size} ranks exchange activations or are on hosts of ranks that do: "
                "use ddp, or degrees such as dp=2,pp=2 with all of a replica on one host"
            )
        return cls(strategy, world, [tuple(sorted(ranks)) for ranks in found])

    def own_group(self, groups: Groups) -> Any:
        """A process group of this rank's replica, None for a rank alone; all ranks must call it."""
        if self.n == 1:
            return dist.group.WORLD if self._world.size > 1 else None
        made = {ranks: groups.for_sums(ranks) for ranks in self.all if len(ranks) > 1}
        return made.get(self.own)

    def sharing_groups(self, holders: Group) -> list[Group]:
        """The groups of a slice's holders that each keep its state in parts."""
        state, hosts = self._strategy.shard_state, self._world.hostnames
        return [group for own in self.split(holders) for group in sharing_groups(state, own, hosts)]

    def split(self, ranks: Iterable[int]) -> list[Group]:
        """The ranks of a group that belong to each replica, for each that has some."""
        parts = [tuple(rank for rank in ranks if rank in own) for own in self.all]
        return [part for part in parts if part]

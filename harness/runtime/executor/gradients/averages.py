"""The averages of a rank's weights over replicas (`sharded.replicas`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from harness.domain.shard_state import Group
from harness.errors import StrategyError
from harness.measure.recorder import Recorder
from harness.runtime.devices.precision import sent_bytes
from harness.runtime.engines.engine import CollectiveSpans, EngineOptions, Share
from harness.runtime.engines.local_sgd import ReplicaAverage
from harness.runtime.engines.phases import Phases
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.sharded.owners import part_holders
from harness.runtime.executor.sharded.replicas import Replicas
from harness.runtime.executor.state.weights import Holders
from harness.runtime.executor.transport.groups import Groups
from harness.runtime.ranks.failures import blaming_peers
from harness.runtime.ranks.quantized_sums import start_all_reduce
from harness.runtime.ranks.world import World


def updaters(holders: Holders, replicas: Replicas) -> dict[WeightSlice, Group]:
    """The ranks of all replicas that update each slice, or part of one.

    Raises:
        StrategyError: unlike numbers of ranks share a slice in two replicas.
    """
    found: dict[WeightSlice, Group] = {}
    for piece, devices in holders.trained():
        groups = replicas.sharing_groups(devices)
        if len(set(map(len, groups))) > 1:
            raise StrategyError(
                f"sync_every averages equal parts of replicas, and ranks {groups[0]} share "
                f"{piece.name}, as do {min(groups, key=len)}: give each replica as many ranks, or "
                "shard no state"
            )
        found |= part_holders(piece, groups)
    return found


def ranks_alike(held_by: Mapping[WeightSlice, Group], replicas: Replicas) -> list[Group]:
    """The sets of ranks that update the same slices, which are averaged with each other.

    Raises:
        StrategyError: a replica lacks ranks like those of another.
    """
    held: dict[int, set[WeightSlice]] = defaultdict(set)
    for piece, devices in held_by.items():
        for rank in devices:
            held[rank].add(piece)
    sets: dict[frozenset[WeightSlice], list[int]] = defaultdict(list)
    for rank in sorted(held):
        sets[frozenset(held[rank])].append(rank)
    for ranks in sets.values():
        for own in replicas.all:
            if set(own).isdisjoint(ranks):
                raise StrategyError(
                    f"sync_every averages replicas that are cut alike, and no rank of {own} "
                    f"holds the same slices of weights as rank {ranks[0]}: give each replica as "
                    "many ranks, in the same order"
                )
    return sorted(tuple(ranks) for ranks in sets.values())


class ReplicaAverages:
    """Averages this rank's weights with those of the ranks alike; all ranks must make the same
    calls.

    Args:
        own: the slices, or parts of them, that this rank updates.
        options: with `outer`.

    Attributes:
        replicas: that are averaged.
        average: this rank's part of it, with what all replicas agree on.
    """

    def __init__(
        self,
        holders: Holders,
        replicas: Replicas,
        own: Mapping[WeightSlice, nn.Parameter],
        world: World,
        recorder: Recorder,
        options: EngineOptions,
        groups: Groups,
    ) -> None:
        outer = options.outer
        assert outer is not None, "gradients are summed otherwise"
        held_by = updaters(holders, replicas)
        is_quantized = options.reduce_dtype == "int8"
        made = {
            ranks: groups.for_sums(ranks, is_quantized=is_quantized)
            for ranks in ranks_alike(held_by, replicas)
        }
        self.replicas = replicas
        self._ranks = next((ranks for ranks in made if world.rank in ranks), ())
        self._n_together = len(set(self._ranks) & set(replicas.own))
        self._group, self._spans = made.get(self._ranks), CollectiveSpans(world, recorder)
        named = {str(piece): parameter for piece, parameter in own.items()}
        # Of all ranks, so that those of a replica that share a slice average equal elements of it.
        sizes = {str(piece): piece.n_elements for piece in sorted(held_by)}
        self.average = ReplicaAverage(named, outer, self._sum, options.reduce_dtype, sizes)

    def _sum(self, tensor: Tensor, name: str, reduce_dtype: str) -> Any:
        begin = partial(start_all_reduce, tensor, reduce_dtype, self._group)
        return self._spans.start(begin, name, sent_bytes(tensor, reduce_dtype))

    @contextmanager
    def agreeing(self, gather: Callable[[], None]) -> Iterator[None]:
        """Let this rank's weights be those that all replicas agree on; all ranks must call it.

        Args:
            gather: gets other ranks' parts after this one's have been changed.
        """
        agreed = self.average.whole()
        own = {parameter: parameter.detach().clone() for parameter in agreed}
        _assign(agreed)
        gather()
        try:
            yield
        finally:
            _assign(own)
            gather()

    def begin(self, share: Share) -> None:
        if self._ranks:
            self.average.begin(1 / share.replica_factor / self._n_together)

    def finish(self, phases: Phases) -> None:
        """Wait for the average and move this rank's weights with it.

        Raises:
            PeerError: another rank died or hangs; NCCL ends this process instead.
        """
        if not self._ranks:
            return
        phases.wait(self._wait, name="average")
        phases.begin("optimizer", name="average")
        self.average.update()

    def _wait(self) -> None:
        failure = f"the average of weights over ranks {list(self._ranks)} failed"
        with blaming_peers(failure, self._ranks):
            self.average.wait()


def _assign(values: Mapping[Tensor, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.detach().copy_(value)

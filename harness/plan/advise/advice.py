"""Which machines to use: price sets of them, what each left-out one costs, what others bring."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from harness.domain.checkpoints import MOST_OF_STAGE, can_recompute, with_recomputation
from harness.domain.cluster import Cluster
from harness.domain.strategy import Strategy
from harness.errors import PlanError
from harness.plan import builders
from harness.plan.advise.measured import Uncertainty
from harness.plan.advise.prices import Prices
from harness.plan.advise.pricing import (
    AdviceRequest,
    Build,
    Priced,
    factor_of,
    largest_batch,
    price,
)
from harness.plan.advise.sets import (
    devices_by_speed,
    next_ethernet,
    node_classes,
    node_rate,
    part_of,
    sets_of,
    with_device,
    with_rate,
)
from harness.plan.costs import family_of
from harness.plan.portfolio import check_times
from harness.plan.search.space import balanced_pipeline
from harness.plan.simulate.network import SLOWER
from harness.plan.simulate.simulator import Simulator, operator_seconds

# Sets with about the samples/s of the best are searched too.
_N_SEARCHED = 3
# Predictions do not tell sets apart whose samples/s differ by less.
NEARLY = 0.95

# Flags of training that send fewer bytes, and what they change in a request. Data parallelism by
# averaged replicas is not the training of one device.
_CHEAPER_SUMS: dict[str, dict[str, Any]] = {
    "--reduce-dtype bf16": {"reduce_dtype": "bf16"},
    "--reduce-dtype int8": {"reduce_dtype": "int8"},
    "averaged replicas: --strategy ddp --sync-every 32": {
        "sync_every": 32,
        "families": ("ddp",),
        "known": (),
    },
}

# Of the time, left after pricing the sets, and after searching.
_SHARES_LEFT = (0.65, 0.4)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A class of nodes that the best set leaves out, or some of it.

    Attributes:
        with_it: the best set with one of them; None if nothing fits then.
        cause: `link` or `device`, whose exchange for the best of the cluster gains most; empty
            where neither gains anything that predictions tell apart.
        rate: bytes/s of its fastest link; None for a single node.
        slowness: its device's seconds over those of the fastest.
    """

    nodes: list[str]
    with_it: Priced | None
    cause: str
    rate: float | None
    slowness: float
    kind: str
    fastest_kind: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """The best samples/s with other hardware, or by flags that send fewer bytes."""

    name: str
    best: Priced


@dataclass(frozen=True)
class LargestBatch:
    """The largest global batch that a strategy can train on some devices; 0: none.

    Attributes:
        recomputed_batch: with recomputation by the segments that need the least memory; None where
            forward may not run twice.
    """

    strategy: str
    devices: str
    batch: int
    recomputed_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer.

    Attributes:
        sets: priced sets of machines, the fastest first.
        best: the fewest devices that are about as fast as the fastest set.
        single: the fastest device alone; None where the model does not fit on any.
        n_unpriced: sets for which the time was too short.
        uncertainty, prices: of its predictions and machines, for people.
    """

    request: AdviceRequest
    cluster: Cluster
    sets: list[Priced]
    best: Priced
    single: Priced | None
    left_out: list[LeftOut]
    changes: list[Change]
    largest: list[LargestBatch]
    n_unpriced: int
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    prices: Prices | None = None


def best_of(sets: Sequence[Priced]) -> Priced:
    """The fastest of the sets with the fewest devices among those of nearly the most samples/s."""
    most = max(one.samples_per_s for one in sets)
    near = [one for one in sets if one.samples_per_s >= NEARLY * most]
    return min(near, key=lambda one: (one.cluster.n_devices, -one.samples_per_s))


class Adviser:
    """Prices sets of one cluster's machines for one model.

    Args:
        seconds: processor time, so that other work on the host changes no answer; the likely sets
            are priced in any case.
        progress: called with (sets done, sets in all).
    """

    def __init__(
        self,
        request: AdviceRequest,
        cluster: Cluster,
        *,
        seconds: float,
        progress: Progress = lambda done, of: None,
    ) -> None:
        self.request, self.cluster = request, cluster
        self.seconds, self.progress = seconds, progress
        self.start_s = time.process_time()
        simulator, batch = request.simulator(cluster), request.batch_on(1)
        check_times(simulator, batch)
        # Of a whole batch on each device, and on the fastest of each node.
        self.device_s: list[float] = operator_seconds(simulator, batch).sum(axis=1).tolist()
        first = [own[0] for own in devices_by_speed(cluster, self.device_s)]
        self.node_s: list[float] = [self.device_s[k] for k in first]
        self.node_devices = [cluster.devices[k] for k in first]
        self.rates = [node_rate(cluster, k) or 0.0 for k in range(len(cluster.nodes))]
        self.fastest_s = min(self.node_s)
        self.fastest = self.node_devices[self.node_s.index(self.fastest_s)]

    def _share_left(self) -> float:
        return 1 - (time.process_time() - self.start_s) / self.seconds

    def advise(self) -> Advice:
        """The whole answer.

        Raises:
            PlanError: the model fits on no set of the machines.
        """
        sets, n_unpriced = self._price_sets()
        sets = self._search(sets)
        self.request = replace(self.request, factor=factor_of(self.request, sets))
        sets = _ranked([one.at(self.request.factor) for one in sets])
        if not sets:
            raise PlanError(
                f"{self.request.graph.name!r} fits on no set of these machines at this batch: "
                "lower --batch-size, or add devices or memory"
            )
        best = best_of(sets)
        return Advice(
            request=self.request,
            cluster=self.cluster,
            sets=sets,
            single=next((one for one in sets if one.cluster.n_devices == 1), None),
            best=best,
            left_out=list(self._left_out(best, sets)),
            changes=self._changes(best, sets),
            largest=list(self._largest(best)),
            n_unpriced=n_unpriced,
        )

    def _price_sets(self) -> tuple[list[Priced], int]:
        wanted = sets_of(self.cluster, self.device_s)
        likely = self._fastest_first()
        wanted.sort(key=lambda devices: len(devices) > 1 and devices not in likely)
        found: list[Priced] = []
        for done, devices in enumerate(wanted):
            is_likely = len(devices) == 1 or devices in likely
            if not is_likely and self._share_left() < _SHARES_LEFT[0]:
                return _ranked(found), len(wanted) - done
            self.progress(done, len(wanted))
            priced = price(self.request, part_of(self.cluster, devices))
            found += [] if priced is None else [priced]
        return _ranked(found), 0

    def _fastest_first(self) -> set[tuple[int, ...]]:
        """The first 2, 3 and so on of the nodes by speed, and of those by link and then speed."""
        nodes, node_of = range(len(self.cluster.nodes)), self.cluster.node_of()
        by_speed = sorted(nodes, key=self.node_s.__getitem__)
        by_link = sorted(by_speed, key=self._is_link_slow)
        return {
            tuple(k for k, node in enumerate(node_of) if node in order[:n])
            for order in (by_speed, by_link)
            for n in range(1, len(nodes) + 1)
        }

    def _search(self, sets: list[Priced]) -> list[Priced]:
        """Search on the most promising sets, and on the largest; on all machines where no standard
        strategy fits on any set."""
        if "searched" not in self.request.families:
            return sets
        if not sets:
            found = price(
                self.request, self.cluster, search_cpu_s=self._share_left() * self.seconds
            )
            return [] if found is None else [found]
        chosen = sets[:_N_SEARCHED]
        most = max(one.cluster.n_devices for one in sets)
        chosen += [one for one in sets[_N_SEARCHED:] if one.cluster.n_devices == most]
        each_s = max(0.2, (self._share_left() - _SHARES_LEFT[1]) * self.seconds / len(chosen))
        searched = {
            id(one): price(self.request, one.cluster, search_cpu_s=each_s) or one for one in chosen
        }
        return _ranked([searched.get(id(one), one) for one in sets])

    def _left_out(self, best: Priced, sets: Sequence[Priced]) -> Iterator[LeftOut]:
        for nodes in node_classes(self.cluster):
            unused = [k for k in nodes if self.cluster.nodes[k].name not in best.node_names]
            if unused:
                yield self._why(unused, best, sets)

    def _why(self, unused: Sequence[int], best: Priced, sets: Sequence[Priced]) -> LeftOut:
        """Whether the link or the device of a node makes it cost."""
        node = unused[0]
        names = {*best.node_names, self.cluster.nodes[node].name}
        cluster = part_of(self.cluster, _devices_on(self.cluster, names))
        at = [one.name for one in cluster.nodes].index(self.cluster.nodes[node].name)
        known = [one for one in sets if one.node_names == [n.name for n in cluster.nodes]]
        plain = known[0] if known else price(self.request, cluster)
        changed = {}
        if self._is_link_slow(node):
            changed["link"] = with_rate(cluster, at, max(self.rates))
        if self._is_device_slow(node):
            changed["device"] = with_device(cluster, at, self.fastest)
        cause = ""
        if plain is not None and changed:
            gains = {name: self._predicted(plain.strategy, one) for name, one in changed.items()}
            most = max(gains, key=gains.__getitem__)
            is_gain = NEARLY * gains[most] >= self._predicted(plain.strategy, cluster)
            cause = most if is_gain else ""
        return LeftOut(
            nodes=[self.cluster.nodes[k].name for k in unused],
            with_it=plain,
            cause=cause,
            rate=node_rate(cluster, at),
            slowness=self.node_s[node] / self.fastest_s,
            kind=self.node_devices[node].kind,
            fastest_kind=self.fastest.kind,
        )

    def _predicted(self, strategy: Strategy, cluster: Cluster) -> float:
        """Samples/s of the strategy on the cluster, or of a standard one that is faster there."""
        simulation = self.request.simulator(cluster).simulate(strategy)
        own = [strategy.batch / simulation.step_s] if simulation.fits else []
        standard = price(replace(self.request, known=(), factor=1.0), cluster)
        return max([*own, 0.0 if standard is None else standard.samples_per_s])

    def _is_link_slow(self, node: int) -> bool:
        return max(self.rates) > SLOWER * self.rates[node]

    def _is_device_slow(self, node: int) -> bool:
        return self.node_s[node] > SLOWER * self.fastest_s

    def _changes(self, best: Priced, sets: Sequence[Priced]) -> list[Change]:
        """Every change that is worth more than the uncertainty of a comparison, best first."""
        found = []
        for name, cluster, node in self._changed_clusters():
            names = set(best.node_names) | ({node} if node is not None else set())
            wanted = {tuple(_devices_on(cluster, names)), tuple(range(cluster.n_devices))}
            priced = [price(self.request, part_of(cluster, devices)) for devices in wanted]
            fits = [one for one in priced if one is not None]
            found.append(Change(name=name, best=best_of([*fits, best])))
        for name, flags in _CHEAPER_SUMS.items() if self.cluster.n_devices > 1 else ():
            plain = self.request.untried()
            request = replace(plain, **flags)
            if request != plain and set(request.families) <= set(self.request.families):
                found.append(self._with_cheaper_sums(name, request, best, sets))
        return sorted(found, key=lambda change: -change.best.samples_per_s)

    def _with_cheaper_sums(
        self, name: str, request: AdviceRequest, best: Priced, sets: Sequence[Priced]
    ) -> Change:
        """On today's fastest set of several devices, and on all."""
        several = [one.cluster for one in sets if one.cluster.n_devices > 1][:1]
        wanted = {cluster.n_devices: cluster for cluster in (*several, self.cluster)}
        priced = [price(request, cluster) for cluster in wanted.values()]
        is_averaging = request.sync_every > 1  # whole replicas
        fits = [
            one
            for one in priced
            if one is not None and not (is_averaging and one.strategy.shard_state != "none")
        ]
        return Change(name=name, best=best_of([*fits, best]))

    def _changed_clusters(self) -> Iterator[tuple[str, Cluster, str | None]]:
        """Name, cluster, and the changed node (None: all)."""
        if len(self.cluster.nodes) == 1:
            return
        for first, *_ in node_classes(self.cluster):
            node = self.cluster.nodes[first].name
            faster = next_ethernet(self.rates[first])
            if faster is not None and self._is_link_slow(first):
                yield f"{node} on {faster[0]}", with_rate(self.cluster, first, faster[1]), node
            if self._is_device_slow(first):
                changed = with_device(self.cluster, first, self.fastest)
                yield f"{node} with {self.fastest.kind}", changed, node
        if faster := next_ethernet(max(self.rates)):
            yield f"all nodes on {faster[0]}", with_rate(self.cluster, None, faster[1]), None

    def _largest(self, best: Priced) -> Iterator[LargestBatch]:
        """Alone on each kind of device; data parallel, with and without sharded state, and a
        pipeline on the best set and on all; each with and without recomputation."""
        kinds = {device.kind: k for k, device in reversed(list(enumerate(self.cluster.devices)))}
        for kind, k in kinds.items():
            alone = part_of(self.cluster, [k])
            yield self._largest_of("single", kind, alone, _ddp, 1)
        groups = {"all machines": self.cluster}
        if 1 < best.cluster.n_devices < self.cluster.n_devices:
            groups = {"the best set": best.cluster, **groups}
        for name, cluster in groups.items():
            if cluster.n_devices == 1:
                continue
            for strategy, (build, n_each) in _SPREAD.items():
                if family_of(strategy) in self.request.families:
                    least = n_each * cluster.n_devices
                    yield self._largest_of(strategy, name, cluster, build, least)

    def _largest_of(
        self, strategy: str, devices: str, cluster: Cluster, build: Build, least: int
    ) -> LargestBatch:
        batches = [
            largest_batch(self.request, cluster, one, least)
            for one in (build, partial(_recomputed, build))[: 1 + can_recompute(self.request.graph)]
        ]
        return LargestBatch(strategy, devices, *batches)


def _devices_on(cluster: Cluster, names: set[str]) -> list[int]:
    """Positions of the devices of some nodes."""
    return [k for k, n in enumerate(cluster.node_of()) if cluster.nodes[n].name in names]


def _ranked(sets: list[Priced]) -> list[Priced]:
    return sorted(sets, key=lambda one: -one.samples_per_s)


def _recomputed(build: Build, simulator: Simulator, batch: int) -> Strategy:
    return with_recomputation(build(simulator, batch), simulator.graph, MOST_OF_STAGE)


def _ddp(simulator: Simulator, batch: int) -> Strategy:
    return builders.ddp(simulator.graph, simulator.cluster, batch)


def _sharded_ddp(simulator: Simulator, batch: int) -> Strategy:
    return msgspec.structs.replace(_ddp(simulator, batch), shard_state="parameters")


def _pipeline(simulator: Simulator, batch: int) -> Strategy:
    n = 1 if simulator.graph.mixing_operator() else 4 * simulator.cluster.n_devices
    return balanced_pipeline(simulator, batch, n)


# With the fewest samples for each device.
_SPREAD: dict[str, tuple[Build, int]] = {
    "ddp": (_ddp, 1),
    "ddp, sharded parameters": (_sharded_ddp, 1),
    "pipeline": (_pipeline, 4),
}

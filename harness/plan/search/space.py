"""The choices of one operator: which cuts, on which devices.

On few devices every subset is offered. On many, only sets that a person would think of: runs of
neighbours, nodes and groups of nodes, one device of each node, the fastest k. A random set of
devices is hardly ever a good one, and makes most proposals useless.
"""

from collections.abc import Iterator
from itertools import combinations

from harness.domain.cluster import Cluster
from harness.domain.key_forms import POSITIONS, key_forms
from harness.domain.partition import REPLICA, SAMPLE, Cut
from harness.domain.sharding import CONTRACTION, HEADS, cuttable_dims, may_have_copies
from harness.domain.strategy import OperatorPlan
from harness.plan.simulate.costs import Costs

ALL_SUBSETS_UP_TO = 4  # devices


def device_sets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Sets of at least two devices that an operator may be spread over, without repetition."""
    n = cluster.n_devices
    if n <= ALL_SUBSETS_UP_TO:
        return [s for k in range(2, n + 1) for s in combinations(range(n), k)]
    found: dict[tuple[int, ...], None] = {}
    for devices in _likely_sets(cluster):
        if len(devices) > 1:
            found.setdefault(tuple(sorted(devices)))
    return list(found)


def _likely_sets(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    n, node_of = cluster.n_devices, cluster.node_of()
    by_node = [[d for d in range(n) if node_of[d] == k] for k in range(len(cluster.nodes))]
    yield tuple(range(n))
    yield from (tuple(own) for own in by_node)
    for k in range(1, max(map(len, by_node)) + 1):
        yield tuple(d for own in by_node for d in own[:k])
    width = 2
    while width < n:
        yield from (tuple(range(a, a + width)) for a in range(0, n - width + 1, width))
        width *= 2
    width = 2
    while width < len(by_node):
        for a in range(0, len(by_node) - width + 1, width):
            yield tuple(d for own in by_node[a : a + width] for d in own)
        width *= 2
    fastest = sorted(range(n), key=lambda d: (-cluster.devices[d].speed, d))
    yield from (tuple(fastest[:k]) for k in range(2, n))


class Space:
    """Every operator's menu of plans, for one size of microbatch."""

    def __init__(self, costs: Costs, cluster: Cluster, placed: list[int]) -> None:
        self._costs = costs
        self._n_devices = cluster.n_devices
        self._sets = device_sets(cluster)
        self.menus: dict[int, list[OperatorPlan]] = {}
        shared: dict[object, list[OperatorPlan]] = {}
        for op in placed:
            operator, shape = costs.graph.operators[op], costs.shapes[op]
            key = operator.kind, tuple(shape.items()), operator.profile_key
            if key not in shared:
                shared[key] = self._menu(op)
            self.menus[op] = shared[key]

    @property
    def size(self) -> float:
        """Number of strategies in the space."""
        size = 1.0
        for menu in self.menus.values():
            size *= len(menu)
        return size

    def _menu(self, op: int) -> list[OperatorPlan]:
        forms = key_forms(self._costs.graph.operators[op], self._costs.graph)
        whole = [OperatorPlan({}, [device]) for device in range(self._n_devices)]
        spread = [
            OperatorPlan(cuts, list(devices), keys=keys)
            for devices in self._sets
            for cuts in self._cuts(op, devices)
            for keys in (forms if POSITIONS in cuts else forms[:1])
        ]
        return whole + spread

    def _cuts(self, op: int, devices: tuple[int, ...]) -> Iterator[dict[str, Cut]]:
        shape, n = self._costs.units(op), len(devices)
        dims = cuttable_dims(self._costs.graph.operators[op], shape)
        for dim in dims:
            if shape[dim] >= n and dim != "width":
                yield {dim: n}
        if n > 1 and may_have_copies(self._costs.graph.operators[op]):
            yield {REPLICA: n}
        if SAMPLE in dims:
            shares = self._shares(op, devices)
            if shares is not None:
                yield {SAMPLE: shares}
            yield from self._mixed_cuts(op, n, dims)

    def _mixed_cuts(self, op: int, n: int, dims: list[str]) -> Iterator[dict[str, Cut]]:
        """By samples and another of `dims`, or by samples and copies."""
        shape = self._costs.units(op)
        second = [dim for dim in ("feature", HEADS, CONTRACTION) if dim in dims]
        fewer = [a for a in range(2, n // 2 + 1) if n % a == 0 and shape[SAMPLE] >= a]
        for dim in second:
            for a in fewer:
                if shape[dim] >= n // a:
                    yield {SAMPLE: a, dim: n // a}
        if may_have_copies(self._costs.graph.operators[op]):
            for a in fewer:
                yield {SAMPLE: a, REPLICA: n // a}

    def _shares(self, op: int, devices: tuple[int, ...]) -> list[int] | None:
        """Samples in proportion to how fast each device runs this operator; None when alike."""
        whole = tuple((0, size) for size in self._costs.shapes[op].values())
        samples = self._costs.units(op)[SAMPLE]
        if samples < len(devices):
            return None
        times = [self._costs.times.block_s(op, whole, device) for device in devices]
        seconds = [time.forward_s + time.backward_s for time in times]
        return proportional_shares(seconds, samples)


def proportional_shares(seconds: list[float], samples: int) -> list[int] | None:
    """Whole samples per device, inversely to their seconds; None when equal shares do as well.

    Largest remainders get the samples that rounding down leaves; nobody gets none.
    """
    if min(seconds) <= 0 or max(seconds) < 1.02 * min(seconds):
        return None
    rates = [1 / s for s in seconds]
    exact = [samples * rate / sum(rates) for rate in rates]
    shares = [max(1, int(value)) for value in exact]
    order = sorted(range(len(exact)), key=lambda k: (shares[k] - exact[k], k))
    for k in order:
        if sum(shares) < samples:
            shares[k] += 1
    while sum(shares) > samples:
        shares[shares.index(max(shares))] -= 1
    return shares if len(set(shares)) > 1 else None

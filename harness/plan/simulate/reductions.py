"""Costs of all that several devices do together, as the columns of `Work`: all-reduces within a
microbatch, messages around rings, buckets of gradients, and gathers of weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.plan.simulate.gathers import Unit
from harness.plan.simulate.network import Collective, Network
from harness.plan.simulate.tables import Buckets, Tables, pointers
from harness.plan.simulate.transfers import Sum

if TYPE_CHECKING:
    from harness.plan.simulate.simulator import Simulator


class _Priced(NamedTuple):
    """A price, taken `share` times, and the bytes that each device sends and receives."""

    group: tuple[int, ...]
    price: Collective
    share: float
    host_bytes: float


def reduction_columns(
    simulator: Simulator, tables: Tables, buckets: Buckets, gathered: Sequence[Unit]
) -> dict[str, Any]:
    """Fields of `Work`: of all sums forward, of all sums backward, of buckets, and of gathered
    weights."""
    network = simulator.network
    sums, sizes = tables.edge_rows().sums, buckets.n_bytes.astype(int).tolist()
    found = [_sum(network, one, way, tables.mean_size) for way in (0, 1) for one in sums]
    shares = buckets.n_rounds.tolist()
    found += map(_all_reduce, itertools.repeat(network), buckets.groups, sizes, shares)
    found += (_all_reduce(network, unit.group, unit.n_bytes, 0.5) for unit in gathered)
    pairs = [(r, one.share * seconds) for one in found for r, seconds in one.price.occupied]
    return {
        "reduce_seconds": np.array([one.price.duration_s * one.share for one in found]),
        "reduce_ptr": pointers([one.price.occupied for one in found]),
        "reduce_resource": np.array([resource for resource, _ in pairs], dtype=np.int64),
        "reduce_occupied": np.array([seconds for _, seconds in pairs]),
        "reduce_host_bytes": np.array([one.host_bytes for one in found]),
        "group_ptr": pointers([one.group for one in found]),
        "group": np.array(list(_devices(found)), dtype=np.int64),
    }


def _devices(found: Sequence[_Priced]) -> Iterator[int]:
    return itertools.chain.from_iterable(one.group for one in found)


def _sum(network: Network, one: Sum, way: int, mean_size: float) -> _Priced:
    """The price of a sum or of messages; their bytes and seconds are of the largest microbatch."""
    n_bytes, n_rounds = one.n_bytes[way], one.n_rounds[way]
    if one.passes is None:
        size = n_bytes if one.is_collective else round(n_bytes * mean_size)
        return _all_reduce(network, one.group, size, n_rounds)
    rounds, hidden_s = one.passes[way]
    size = round(n_bytes * mean_size)
    price = network.pass_around(one.group, size, rounds, hidden_s * mean_size)
    return _Priced(one.group, price, 1.0, 2.0 * n_rounds * size)


def _all_reduce(network: Network, group: tuple[int, ...], n_bytes: int, share: float) -> _Priced:
    # A ring sends 2 (n - 1) / n of the bytes from each device, which receives as many.
    host_bytes = 4 * (len(group) - 1) / len(group) * n_bytes * share
    return _Priced(group, network.all_reduce(group, n_bytes), share, host_bytes)

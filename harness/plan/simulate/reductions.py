"""Prices of a step's sums over devices and of its gathers of weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.plan.simulate.network import Collective, Network
from harness.plan.simulate.sharded_state import Group, Sharing, Unit
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
    simulator: Simulator,
    tables: Tables,
    buckets: Buckets,
    gathered: Sequence[Unit],
    scattering: Sharing | None,
) -> dict[str, Any]:
    """Fields of `Work`: of all sums forward, of all sums backward, of buckets, and of gathered
    weights.

    Args:
        scattering: of gradients that are summed to their owners.
    """
    network = simulator.network
    sums, options = tables.edge_rows().sums, simulator.options
    sizes = (buckets.n_bytes * options.reduce_bytes_per_gradient_byte).astype(int).tolist()
    sum_up = _all_reduce if options.sync_every == 1 else partial(_average, options.sync_every)
    found = [_sum(network, one, way, tables.mean_size) for way in (0, 1) for one in sums]
    shares = buckets.n_rounds.tolist()
    if scattering is None:
        found += map(sum_up, itertools.repeat(network), buckets.groups, sizes, shares)
    else:
        is_last = (buckets.microbatch == buckets.microbatch.max(initial=0)).tolist()
        for group, size, last in zip(buckets.groups, sizes, is_last, strict=True):
            found.append(_scatter(network, scattering(group), size, last / options.sync_every))
    found += (_all_reduce(network, unit.group, unit.n_bytes, 0.5) for unit in gathered)
    pairs = [(r, one.share * seconds) for one in found for r, seconds in one.price.occupied]
    return {
        "reduce_seconds": np.array([one.price.duration_s * one.share for one in found]),
        "reduce_ptr": pointers([one.price.occupied for one in found]),
        "reduce_resource": np.array([resource for resource, _ in pairs], dtype=np.int64),
        "reduce_occupied": np.array([seconds for _, seconds in pairs]),
        "reduce_host_bytes": np.array([one.host_bytes for one in found]),
        "group_ptr": pointers([one.group for one in found]),
        "group": np.array([device for one in found for device in one.group], dtype=np.int64),
    }


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


def _scatter(
    network: Network, groups: Sequence[Group], n_bytes: int, outer_share: float
) -> _Priced:
    """The price of sums to the owners in groups, and of a share of the bytes between the groups."""
    n, n_groups = len(groups[0]), len(groups)
    price = network.within_and_between(groups, n_bytes, 0.5, outer_share)
    sent = (n - 1) / n / 2 + outer_share * (n_groups - 1) / n_groups / n
    return _Priced(tuple(sorted(itertools.chain(*groups))), price, 1.0, 4 * sent * n_bytes)


def _average(
    every: int, network: Network, group: tuple[int, ...], n_bytes: int, share: float
) -> _Priced:
    part = _all_reduce(network, group, n_bytes // every, share)
    return part._replace(price=network.average(group, n_bytes, 1 / every))

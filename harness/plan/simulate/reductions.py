"""Prices of a step's sums over devices and of its gathers of weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.domain.shard_state import Group, ShardState
from harness.domain.weight_units import Unit
from harness.plan.simulate.network import Collective, CollectiveName, Network
from harness.plan.simulate.tables import Buckets, Ends, Tables, pointers
from harness.plan.simulate.transfers import Sum

if TYPE_CHECKING:
    from harness.plan.simulate.simulator import Simulator


class _Priced(NamedTuple):
    """A price, taken `share` times, and the bytes that each device sends and receives."""

    group: tuple[int, ...]
    price: Collective
    share: float
    host_bytes: float


def with_averages(sums: Buckets, averaged: Buckets) -> Buckets:
    """Sums of gradients, and then averages of replicas for some buckets."""
    device, bucket, before = averaged.ends
    before = np.where(before < 0, -1, before + len(sums.ends.device))
    later = device, bucket + len(sums.groups), before
    return replace(
        sums,
        n_bytes=np.concatenate([sums.n_bytes, averaged.n_bytes]),
        members=sums.members + averaged.members,
        groups=sums.groups + averaged.groups,
        n_rounds=np.concatenate([sums.n_rounds, np.zeros(len(averaged.groups))]),
        microbatch=np.concatenate([sums.microbatch, averaged.microbatch]),
        ends=Ends(*map(np.concatenate, zip(sums.ends, later, strict=True))),
    )


def reduction_columns(
    simulator: Simulator,
    tables: Tables,
    buckets: Buckets,
    gathered: Sequence[Unit],
    shard_state: ShardState,
) -> dict[str, Any]:
    """Fields of `Work`: of all sums forward, of all sums backward, of buckets, and of gathered
    weights."""
    network = simulator.network
    priced = [
        _sum(network, total, way, tables.mean_size)
        for way in (0, 1)
        for total in tables.edge_rows().sums
    ]
    priced += _buckets(simulator, buckets, shard_state)
    wire = simulator.options.wire_bytes_per_fp32_byte
    priced += (_part(network, "all_gather", u.devices, u.sent_bytes(wire)) for u in gathered)
    pairs = [(r, one.share * seconds) for one in priced for r, seconds in one.price.occupied]
    return {
        "reduce_seconds": np.array([one.price.duration_s * one.share for one in priced]),
        "reduce_ptr": pointers([one.price.occupied for one in priced]),
        "reduce_resource": np.array([resource for resource, _ in pairs], dtype=np.int64),
        "reduce_occupied": np.array([seconds for _, seconds in pairs]),
        "reduce_host_bytes": np.array([one.host_bytes for one in priced]),
        "group_ptr": pointers([one.group for one in priced]),
        "group": np.array([device for one in priced for device in one.group], dtype=np.int64),
    }


def _sum(network: Network, total: Sum, way: int, mean_size: float) -> _Priced:
    """The price of a sum or of messages of the mean microbatch."""
    size, n_rounds = total.size(way, mean_size), total.n_rounds[way]
    if total.passes is None:
        return _all_reduce(network, total.group, size, n_rounds)
    rounds, hidden_s = total.passes[way]
    price = network.pass_around(total.group, size, rounds, hidden_s * mean_size)
    return _Priced(total.group, price, 1.0, 2.0 * n_rounds * size)


def _all_reduce(network: Network, group: tuple[int, ...], n_bytes: int, share: float) -> _Priced:
    # A ring sends 2 (n - 1) / n of the bytes from each device, which receives as many.
    host_bytes = 4 * (len(group) - 1) / len(group) * n_bytes * share
    return _Priced(group, network.all_reduce(group, n_bytes), share, host_bytes)


def _part(network: Network, operation: CollectiveName, group: Group, n_bytes: int) -> _Priced:
    """The price of an all-gather or a reduce-scatter."""
    host_bytes = 2 * (len(group) - 1) / len(group) * n_bytes
    return _Priced(group, network.priced(operation, group, n_bytes), 1.0, host_bytes)


def _buckets(simulator: Simulator, buckets: Buckets, shard_state: ShardState) -> Iterator[_Priced]:
    """The prices of sums of gradients, and of averages of replicas."""
    network, every = simulator.network, simulator.options.sync_every
    sharing = None if shard_state == "none" else simulator.sharing(shard_state)
    sizes = (buckets.n_bytes * simulator.options.reduce_bytes_per_gradient_byte).astype(int)
    last = buckets.microbatch.max(initial=-1)
    flows = zip(buckets.groups, sizes.tolist(), buckets.n_rounds, buckets.microbatch, strict=True)
    for group, size, share, microbatch in flows:
        groups = [] if sharing is None else sharing(group)
        if len(groups) == 1:
            priced = _part(network, "reduce_scatter", group, size)
        elif groups:
            ends = microbatch == last if every == 1 else (share == 0) / every
            priced = _of_groups(network, groups, size, share, ends)
        elif every > 1 and share > 0:
            priced = _of_groups(network, network.replicas(group), size, share, 0.0)
        else:
            priced = _all_reduce(network, group, size // every, 1.0)
        yield priced if share > 0 else priced._replace(price=network.beside(priced.price))


def _of_groups(
    network: Network, groups: Sequence[Group], n_bytes: int, inner_share: float, outer_share: float
) -> _Priced:
    """The price of a share of an all-reduce in each group, and of one of equal parts of a share of
    the bytes between the groups."""
    n, n_groups = len(groups[0]), len(groups)
    price = network.within_and_between(groups, n_bytes, inner_share, outer_share)
    sent = inner_share * (n - 1) / n + outer_share * (n_groups - 1) / n_groups / n
    return _Priced(tuple(sorted(itertools.chain(*groups))), price, 1.0, 4 * sent * n_bytes)
